import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # BLAS threads keep spinning and take the cores from the kernels
os.environ["NUMFLASH_TILINGS"] = os.path.join(
    os.path.dirname(__file__), "none.json"
)  # no choice of this user
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two test processes share the cores
