"""The example scripts of site/ on a real Slurm: resizable, and every rank sees its GPUs."""

from __future__ import annotations

import re

from ci.cluster import Cluster
from slurm_ext.domain.directive import extract_from_admin_comment
from tests.cluster.runner import lacks_pmix
from tests.unit.site.prose import SITE, forms

EXAMPLES = SITE / "examples"
BIN = "/home/alice/bin"
# What ft-run does has its own tests; here it only takes its options away.
FT_RUN = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
# Stands for python, torchrun and accelerate: one line for each process that srun starts.
STUB = '#!/bin/sh\necho "process $SLURM_PROCID of $SLURM_NTASKS gpus=$CUDA_VISIBLE_DEVICES"\n'


def test_every_example_is_resizable_in_the_form_that_its_readme_says_and_runs(cluster: Cluster):
    expected = forms()
    assert set(expected) == {path.name for path in EXAMPLES.glob("*.sbatch")}
    cluster.exec(["mkdir", "-p", BIN], user="alice")
    for name in ("python", "torchrun", "accelerate"):
        cluster.put(f"{BIN}/{name}", STUB, mode=0o755, owner="alice")
    cluster.put(f"{BIN}/ft-run", FT_RUN, mode=0o755, owner="alice")
    path = f"--export=ALL,PATH={BIN}:/usr/local/bin:/usr/bin:/bin"
    scripts = {name: (EXAMPLES / name).read_text() for name in sorted(expected)}
    if lacks_pmix(cluster):  # the stub needs none
        scripts = {name: text.replace("--mpi=pmix", "--mpi=none") for name, text in scripts.items()}
    jobs = {name: cluster.sbatch(text, "--output=%j.out", path) for name, text in scripts.items()}
    for name, job_id in jobs.items():
        done = cluster.wait_state(job_id, "COMPLETED", "FAILED", "CANCELLED", limit_s=90)
        said = cluster.get(f"/home/alice/{job_id}.out").decode()
        assert done["JobState"] == "COMPLETED", (name, said)
        directive = extract_from_admin_comment(done["AdminComment"])
        assert directive is not None, name
        assert directive.shape is not None, name
        assert directive.shape.value == expected[name], name
        assert directive.req is not None
        assert not directive.req.why_fixed
        processes = re.findall(r"process (\d+) of (\d+) gpus=([\d,]+)", said)
        assert len(processes) == int(processes[0][1]) == directive.req.ntasks, (name, said)
        gpus = {len(devices.split(",")) for *_, devices in processes}
        per_process = 1 if expected[name] == "rank-per-gpu" else 4
        two = name in ("accelerate.sbatch", "hooks.sbatch")
        assert gpus == {2 if two else per_process}, (name, said)
