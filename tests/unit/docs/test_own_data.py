"""docs/own-data-and-reward.md: the files that it has or names are checked as a user would, and score."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.config.data import RewardConfig
from megatron_rl.errors import EXIT_DONE
from megatron_rl.process.user_functions import load_function
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.worker import RewardFunction
from megatron_rl.types import Group, Prompt
from tests.support import debian
from tests.support.groups import any_response
from tests.support.tiny import REPOSITORY

REWARDS = REPOSITORY / "recipes" / "rewards"
PAGE = (REPOSITORY / "docs" / "own-data-and-reward.md").read_text()
FILES = {  # language and place among the page's blocks of it
    "train.jsonl": ("jsonl", 0),
    "reward.py": ("python", 0),
    "recipe.yaml": ("yaml", 0),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkout's recipes, and beside them the folder of the page's files."""
    (tmp_path / "my").mkdir()
    for name, (language, place) in FILES.items():
        block = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[place]
        assert f"`my/{name}`" in PAGE
        (tmp_path / "my" / name).write_text(block)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    return tmp_path / "my"


def test_the_example_passes_check(folder, capsys):
    arguments = ["--no-transformers", "--set", f"run_root={folder}"]
    assert main(["check", str(folder / "recipe.yaml"), *arguments]) == EXIT_DONE
    told = capsys.readouterr().out
    assert "4 prompts" in told


def test_the_recipe_names_the_files_beside_it(folder):
    recipe = load_recipe(folder / "recipe.yaml")
    assert Path(recipe.data.train[0].path) == folder / "train.jsonl"
    assert recipe.reward.name == f"{folder / 'reward.py'}:last_digit"


@pytest.mark.parametrize(("response", "reward"), [("1,3#3", 1.0), ("1,3#4", 0.1), ("1,3#", 0.0), ("", 0.0)])
def test_the_reward_scores_what_the_page_says(folder, response, reward):
    function = load_function(f"{folder / 'reward.py'}:last_digit")
    assert RewardFunction.of("it", function).begin([{"solution_str": response, "ground_truth": "3"}]) == reward


@pytest.fixture
def judge_url() -> Iterator[str]:
    """A judge: half of the score for `#3`, an error for the first request, nonsense for a response of nonsense."""

    class Judge(BaseHTTPRequestHandler):
        num_requests = 0

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            Judge.num_requests += 1
            said = "what?" if "nonsense" in question else str(0.5 * ("#3" in question))
            body = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(503 if Judge.num_requests == 1 else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def scored(path: Path, function: str, answer: str, *texts: str) -> tuple[Group, dict[str, float]]:
    rollouts = [any_response(f"p/{i}", text=text) for i, text in enumerate(texts)]
    group = Group(Prompt("p", [1], answer), rollouts)
    config = RewardConfig(name=f"{path}:{function}", num_workers=1, retries=1, retry_wait_s=0.0, wait_s=60.0)
    with Rewarder(config, 100) as rewarder:
        return group, rewarder.score([group]).metrics


def test_a_judge_is_asked_over_http_again_where_it_fails_and_what_it_does_not_score_is_masked(judge_url, monkeypatch):
    monkeypatch.setenv("JUDGE_URL", judge_url)
    group, metrics = scored(REWARDS / "judge.py", "judge", "3", "#3", "#4", "nonsense", "#3 again")
    assert [rollout.raw_reward for rollout in group.rollouts] == [0.5, 0.0, 0.0, 0.5]
    assert [rollout.unscored for rollout in group.rollouts] == [False, False, True, False]
    assert (metrics["reward/errors"], metrics["reward/unscored_frac"]) == (1, 0.25)
    assert metrics["reward/retries"] >= 1  # the refused request, if it was not the one of nonsense


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    if shutil.which("bwrap") is None:
        debian.install(("bubblewrap",))
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap: Debian's package could not be installed")
    if subprocess.run(command, capture_output=True, timeout=60).returncode:
        pytest.skip("bubblewrap cannot make namespaces on this machine")


DOUBLE, TESTS = "def double(x):\n    return 2 * x", "assert double(21) == 42"
ATTEMPTS = [  # program, tests, whether it passes them
    (DOUBLE, TESTS, True),
    ("def double(x):\n    return x", TESTS, False),
    ("import os\nos._exit(0)", TESTS, False),
    ("while True:\n    pass", TESTS, False),
    (f"def double(x):\n    return len(open({__file__!r}).read())", TESTS, False),
    (f"import socket\nsocket.create_connection(('127.0.0.1', PORT), 5)\n{DOUBLE}", TESTS, False),
    # programs whose text or names would reach into the tests
    ("@lambda f: lambda *a: 0", "def check(c):\n    assert c(1) == 3\ncheck(double)", False),
    ("double = None\n@lambda f: lambda *a: 0", "def check(c):\n    assert c(1) == 3\ncheck(double)", False),
    ("text = '''", f"{TESTS}\n'''", False),
    ("double = 1 \\", TESTS, False),
    ("if 0:", f"    {TESTS}", False),
    ("raise SystemExit", TESTS, False),
    ("import atexit\natexit.register(print, 42)", TESTS, False),
    ("all = lambda x: True\ndouble = len", "assert all([double('') == 42])", False),
    ("__builtins__ = {'all': lambda x: True}\ndouble = str", "assert all([double(21) == 42])", False),
    ("import builtins\nbuiltins.all = lambda x: True\ndouble = len", "assert all([double('') == 42])", False),
    ("import builtins\nbuiltins.exec = lambda *a: 0", TESTS, False),
    (
        "import math\nmath.isclose = lambda *a: 1\ndouble = len",
        "import math\nassert math.isclose(double(''), 42)",
        False,
    ),
    ("import sys\nsys.modules['math'] = type('M', (), {'pi': 42})", "import math\nassert math.pi == 42", False),
    ("import sys\nsys.settrace(lambda *a: sys.exit())\n" + DOUBLE, TESTS, True),
    # output and texts without bounds
    ("import os\nwhile True:\n    for n in range(9):\n        os.write(n, b'x' * 10**6)", TESTS, False),
    ("while True:\n    print('x' * 10**6)", TESTS, False),
    ("text = '\ud800'", TESTS, False),
    (DOUBLE, f"{TESTS}  # \ud800", False),
    ("text = '\0'", TESTS, False),
    # programs that are only unusual
    (f"{DOUBLE}\nprint(double(1))", TESTS, True),
    (f"from __future__ import annotations\nimport sys\nsys.stdin.read()\n{DOUBLE}", TESTS, True),
    (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndouble = lambda x: A(2 * x).x",
        TESTS,
        True,
    ),
    ("from fractions import Fraction\ndouble = lambda x: Fraction(2 * x)", f"from fractions import *\n{TESTS}", True),
]


def test_a_sandbox_scores_programs_and_keeps_them_in(tmp_path, bubblewrap, judge_url):
    file = tmp_path / "run_code.py"
    file.write_text((REWARDS / "run_code.py").read_text().replace("ulimit -t 5;", "ulimit -t 1;"))
    port = judge_url.rpartition(":")[2]
    by_tests = {tests: [row for row in ATTEMPTS if row[1] == tests] for _, tests, _ in ATTEMPTS}
    for tests, rows in by_tests.items():
        programs = [f"```python\n{code.replace('PORT', port)}\n```" for code, _, _ in rows]
        group, metrics = scored(file, "passes_tests", tests, *programs, "no code")
        expected = [*(float(passes) for _, _, passes in rows), 0.0]
        assert dict(zip(programs, group.rewards)) == dict(zip(programs, expected))
        assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (0, 0)


def test_without_a_sandbox_nothing_is_scored(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    group, metrics = scored(REWARDS / "run_code.py", "passes_tests", "", "```python\npass\n```", "no code")
    assert [rollout.unscored for rollout in group.rollouts] == [True, False]
    assert metrics["reward/errors"] == 1
