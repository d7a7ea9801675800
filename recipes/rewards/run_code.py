"""A reward that runs the program of a response in bubblewrap's sandbox: `recipes/rewards/run_code.py:passes_tests`.

The sandbox stops: the network; files other than `/usr`, read-only, and its own `/tmp`; sight of other processes;
processes that go on; more than 5 s of processor time, 10 s on the clock, `reward.memory_limit_mib` a process or files
of 5 MiB. What a program prints is thrown away. The tests are compiled apart from the program, and run with Python's own
names and with the modules that they import as these were before the program. Not stopped are: faults of the kernel;
many processes, and the memory of them all (put the job in a cgroup); a program that searches its own frames for the
mark, starts threads, or returns objects that are equal to all others.
"""

import asyncio
import json
import re
import secrets

BOX = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--ro-bind", "/usr", "/usr"]
BOX += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"]
BOX += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
PROGRAM = 'echo in the box; ulimit -t 5; ulimit -f 10240; PATH=/usr/local/bin:/usr/bin exec python3 -I -c "$0"'
MOST = 200  # bytes that are read of what the box says
RUNNER = """
import ast, builtins, json, os, sys

def run(exec=exec, vars=vars, write=os.write):
    program, tests, mark = json.load(sys.stdin)
    tree = ast.parse(tests)
    program, tests = compile(program, "program", "exec"), compile(tree, "tests", "exec")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})
    modules, main = dict(sys.modules), type(sys)("__main__")
    names = [(vars(module), dict(vars(module))) for module in modules.values()]
    sys.modules["__main__"] = main
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in 0, 1, 2:
        os.dup2(null, number)
    exec(program, vars(main))
    for now, before in names:
        now.update(before)
    sys.modules.update(modules)
    sys.settrace(None)
    sys.setprofile(None)
    own = {name: value for name, value in vars(main).items() if name not in vars(builtins)}
    exec(tests, own | {"__name__": "__main__", "__builtins__": builtins})
    write(channel, mark.encode())

run()
"""


async def passes_tests(response: str, answer: str) -> float:
    """1 if the last Python block of the response passes the tests, which are the gold answer."""
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    mark, pipe = secrets.token_hex(8), asyncio.subprocess.PIPE
    box = await asyncio.create_subprocess_exec(*BOX, "sh", "-c", PROGRAM, RUNNER, stdin=pipe, stdout=pipe, stderr=pipe)
    said = b""
    try:
        box.stdin.write(json.dumps([blocks[-1], answer, mark]).encode())  # in ASCII, whatever the texts hold
        box.stdin.close()
        async with asyncio.timeout(10):
            while len(said) < MOST and (piece := await box.stdout.read(MOST)):
                said += piece
            if not said.startswith(b"in the box"):
                raise RuntimeError(f"no sandbox: {(await box.stderr.read(MOST)).decode(errors='replace')}")
    except TimeoutError:
        return 0.0
    finally:
        if box.returncode is None:
            box.kill()
        for stream in (box.stdout, box.stderr):  # asyncio sees the end of a process when its pipes are read to theirs
            while await stream.read(1 << 16):
                pass
        await box.wait()
    return float(said.decode(errors="replace") == f"in the box\n{mark}")
