"""Batch scripts: valid shell that asks for what was asked, and errors for what no machine has."""

import subprocess

import pytest

from numflash.commands.cli import main
from numflash.commands.job import Request, fugaku, run, slurm
from numflash.errors import ArgumentError


@pytest.mark.parametrize("make", [fugaku, slurm])
def test_a_script_is_valid_shell_and_asks_for_the_request(make):
    request = Request(
        3, 2, 12, "01:00:00", "hp123", "small", "my env", ("python", "-c", "print('a b')")
    )
    text = make(request)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    asked = {
        fugaku: ['"node=3"', "max-proc-per-node=2", "elapse=01:00:00", "eco_state=0", '-g "hp123"', "mpiexec -n 6"],
        slurm: ["--nodes=3", "--ntasks-per-node=2", "--time=01:00:00", "--account=hp123", "--partition=small"],
    }[make]  # fmt: skip
    for part in (*asked, "NUMBA_NUM_THREADS=12", "'my env'/bin/activate", "numba-cache"):
        assert part in text, part
    assert make is fugaku or "export SRUN_CPUS_PER_TASK=12" in text
    assert "python -c 'print('\"'\"'a b'\"'\"')'" in text


@pytest.mark.parametrize(
    ("scheduler", "changes", "message"),
    [
        ("cron", {}, "scheduler: got 'cron'; allowed: 'fugaku', 'slurm'"),
        ("fugaku", {"nodes": 0}, "nodes: got 0; allowed: 1 or more"),
        ("fugaku", {"groups": 5}, "groups: got 5; allowed: 1 to 4"),
        ("fugaku", {"threads": 48}, "threads: got 48; allowed: 1 to 12"),
        ("slurm", {"time": "1 hour"}, "time: got '1 hour'"),
        ("slurm", {"time": "00:00:00"}, "time: got '00:00:00'.* more than none"),
        ("slurm", {"time": "\u0661:00:00"}, "time: got"),
        ("slurm", {"account": "a; rm -r"}, "account: got"),
    ],
)
def test_what_no_machine_has_is_refused(scheduler, changes, message):
    with pytest.raises(ArgumentError, match=message):
        run(scheduler, Request(**changes))


def test_a_home_folder_is_written_out(monkeypatch):
    """Quoted, a shell would leave ~ as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    assert "source /home/me/venv/bin/activate" in slurm(Request(environment="~/venv"))


def test_the_command(capsys):
    assert main(["job", "fugaku", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "mpiexec -n 8" in out and "demo ring --threads 12" in out
    assert main(["job", "slurm", "--nodes", "2", "--", "python", "train.py", "--json"]) == 0
    out = capsys.readouterr().out
    assert "--nodes=2" in out and out.rstrip().endswith("python train.py --json")
    with pytest.raises(SystemExit):
        main(["info", "--", "python"])
    assert "got 'python' after '--'" in capsys.readouterr().err
