"""`doctor.sbatch` on a Slurm of two nodes: a report of each, what is between them, one page.

The hangs are slow, as the script waits out its time: test_scripts.py hangs the same places of it without a cluster.
"""

from __future__ import annotations

import json

import pytest

from megatron_rl.doctor.report import JOB
from tests.slurm.cluster import NODES

pytestmark = pytest.mark.slurm
QUICK = "patches,open-files,shared-folder,nodes,collectives"


def test_nodes_and_what_is_between_them_on_one_page(site):
    job = site.submit("doctor.sbatch", "--only", QUICK)
    assert job.wait() == "COMPLETED", job.log
    folder = site.folder / f"doctor-{job.number}"
    report = json.loads((folder / "doctor.json").read_text())
    by_node = {node["node"]: {c["name"]: c for c in node["checks"]} for node in report["nodes"]}
    assert list(by_node) == [*NODES, "between nodes"]
    assert set(by_node["between nodes"]) == {"nodes", "collectives"}
    assert set(by_node[NODES[0]]) == set(QUICK.split(","))
    assert "seen by 2 of 2 nodes" in by_node["between nodes"]["nodes"]["reason"]
    table = by_node["between nodes"]["collectives"]["figures"]["GiB/s"]
    assert table[f"ranks 0-1 ({', '.join(NODES)})"]["all_reduce"] > 0
    assert by_node[NODES[0]]["shared-folder"]["reason"].startswith(str(folder))
    page = (folder / "doctor.html").read_text()
    assert all(node in page for node in by_node)
    assert f"nothing failed: {folder}/doctor.html" in job.log


def test_a_node_that_lacks_something_fails_the_job(site):
    """The second node's Python does not start: it has no report, and the first's is on the page."""
    python = site.program("a python", f'[ "$SLURMD_NODENAME" != {NODES[1]} ] || exit 9\nexec "$REAL_PYTHON" "$@"\n')
    real = site.environment()["MRL_PYTHON"]
    options = ("--nodes=2", "--export=ALL")
    job = site.submit(
        "doctor.sbatch", "--only", "open-files", options=options, MRL_PYTHON=str(python), REAL_PYTHON=real
    )
    assert job.wait() == "FAILED", job.log
    assert f"{NODES[1]}: report: no report of this node" in job.log
    assert "--exclude=" in (site.folder / f"doctor-{job.number}" / "doctor.html").read_text()


# In every Python of the job: a check of PLANTED ("PLACE:NAME …") stops the doctor that started it, as one
# that waits for a disk for ever, and does not end either.
HANGS = """
import os, signal, sys
if "megatron_rl.doctor.frame" in sys.orig_argv:
    name = sys.orig_argv[sys.orig_argv.index("megatron_rl.doctor.frame") + 1]
    place = "between" if "GROUP_RANK" in os.environ else os.environ["SLURMD_NODENAME"]
    if f"{place}:{name}" in os.environ["PLANTED"].split():
        os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()
"""
SECONDS = 120  # of which the nodes by themselves have 90


ALL = dict.fromkeys(("patches", "open-files", "nodes"), "pass")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (f"{NODES[1]}:open-files", {NODES[1]: {"patches": "pass", "open-files": "fail"}}),
        ("between:nodes", {NODES[1]: ALL, JOB: {"nodes": "fail"}}),
    ],
    ids=["on one node", "between ranks"],
)
def test_what_hangs_is_named_and_the_job_ends(site, planted, expected):
    """What ended before the hang stays on the page, and so do the other nodes."""
    (site.folder / "sitecustomize.py").write_text(HANGS)
    arguments, place = ("doctor.sbatch", "--only", "patches,open-files,nodes"), planted.partition(":")[0]
    environment = {"PYTHONPATH": str(site.folder), "PLANTED": planted, "MRL_DOCTOR_SECONDS": str(SECONDS)}
    job = site.submit(*arguments, **environment)
    assert job.wait() == "FAILED", job.log
    report = json.loads((site.folder / f"doctor-{job.number}" / "doctor.json").read_text())
    statuses = {node["node"]: {c["name"]: c["status"] for c in node["checks"]} for node in report["nodes"]}
    assert set(statuses[NODES[0]].values()) == {"pass"}, job.log
    assert {name: statuses[name] for name in expected} == expected, job.log
    named = JOB if place == "between" else place
    assert f"{named}: {planted.partition(':')[2]}: it was running when the doctor was ended" in job.log
    assert ("the nodes' own checks were ended after" in job.log) == (named != JOB)
