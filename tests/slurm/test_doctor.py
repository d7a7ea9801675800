"""`doctor.sbatch` on a Slurm of two nodes: a report of each, what is between them, one page.

What hangs: test_scripts.py, without a cluster.
"""

from __future__ import annotations

import json

import pytest

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
