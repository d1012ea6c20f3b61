#!/bin/bash
# Make an AArch64 Python with Numba, and an emulator that runs it as an A64FX or a Neoverse, on x86-64 Debian.
# Downloads and unpacks only: no root, no foreign dpkg architecture, no binfmt. Through apt and pip as they are configured.
#
#   usage: setup.sh [FOLDER]     default .aarch64 in the repository; quick when it is already there
#   PYTHON                       the Python whose pip downloads the wheels (default python3)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
env=${1:-$here/../../.aarch64}
python=${PYTHON:-python3}
stamp=$(cat "$here/setup.sh" "$here/requirements.txt" "$here/guest-python" "$here"/cpuinfo/* | sha256sum | cut -c1-16)
mkdir -p "$env"; env=$(cd "$env" && pwd)
if [ -e "$env/stamp-$stamp" ]; then exit 0; fi
for tool in apt-get dpkg-deb "$python"; do
    command -v "$tool" > /dev/null || { echo "setup.sh needs $tool (x86-64 Debian 12 or later)" >&2; exit 1; }
done
rm -rf "${env:?}"/*; cd "$env"; mkdir root site cpu

# apt with a private state, so that another architecture than the machine's can be asked for by anyone
fetch() {                                            # ARCHITECTURE PACKAGE...
    local arch=$1 state=$env/apt-$1; shift
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"; : > "$state/status"
    local options=(-q -o "APT::Architecture=$arch" -o "APT::Architectures::=$arch" -o "Dir::State=$state"
        -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache=$state/cache"
        -o APT::Install-Recommends=false -o APT::Sandbox::User= -o Acquire::Languages=none -o Debug::NoLocking=1)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" -y --download-only install "$@"
}
fetch amd64 qemu-user-static
dpkg-deb --fsys-tarfile apt-amd64/cache/archives/qemu-user-static_*.deb | tar x --strip-components=3 ./usr/bin/qemu-aarch64-static
fetch arm64 python3-minimal python3 libpython3-stdlib libstdc++6 libgomp1 zlib1g libzstd1
for package in apt-arm64/cache/archives/*.deb; do dpkg-deb -x "$package" root; done
[ -e root/lib ] || ln -s usr/lib root/lib            # archives of a merged /usr (Debian 13)
version=$(basename root/usr/bin/python3.[0-9]* | sed s/python//)

# wheels for the guest's Python; pip cannot install for another machine with every version, so unpack them
platforms=$(printf -- '--platform manylinux_%s_aarch64 ' 2_28 2_27 2_17; echo --platform manylinux2014_aarch64)
"$python" -m pip download -q -d wheels $platforms --only-binary=:all: --implementation cp --python-version "$version" \
    --abi "cp${version/./}" --abi abi3 --abi none -r "$here/requirements.txt"
for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" site; done

# one tree per CPU: qemu opens $tree/proc/cpuinfo in place of the host's, and LLVM reads CPU and features there
for text in "$here"/cpuinfo/*; do
    name=$(basename "$text")
    mkdir -p "cpu/$name/proc"; cp "$text" "cpu/$name/proc/cpuinfo"
    for part in root/*; do ln -s "../../$part" "cpu/$name/$(basename "$part")"; done
done
cp "$here/guest-python" .
# subprocesses of the guest start the emulator too
echo 'import os, sys; sys.executable = os.environ.get("NUMFLASH_GUEST_PYTHON", sys.executable)' > site/sitecustomize.py
./guest-python -m compileall -q site > /dev/null 2>&1 || true
rm -rf apt-* wheels
touch "stamp-$stamp"
