"""A reward that runs the program of a response in bubblewrap's sandbox: `recipes/rewards/run_code.py:passes_tests`.

The sandbox stops: the network; files other than `/usr`, read-only, and its own `/tmp`; sight of other processes;
processes that go on; more than 5 s of processor time, 10 s on the clock, `reward.memory_limit_mib` a process or files
of 5 MiB. It does not stop: faults of the kernel; many processes, and the memory of them all (put the job in a cgroup);
a program that searches its own frames for the mark.
"""

import asyncio
import re
import secrets

BOX = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--ro-bind", "/usr", "/usr"]
BOX += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"]
BOX += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
PROGRAM = "echo in the box; ulimit -t 5; ulimit -f 10240; PATH=/usr/local/bin:/usr/bin exec python3 -I -"


async def passes_tests(response: str, answer: str) -> float:
    """1 if the last Python block of the response passes the tests, which are the gold answer."""
    blocks = re.findall(r"```python\n(.*?)```", response, re.DOTALL)
    if not blocks:
        return 0.0
    mark, pipe = secrets.token_hex(8), asyncio.subprocess.PIPE
    code = f"{blocks[-1]}\n{answer}\nprint('{mark}')\n"  # a program that ends before the tests prints no mark
    box = await asyncio.create_subprocess_exec(*BOX, "sh", "-c", PROGRAM, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(10):
            said, errors = await box.communicate(code.encode())
    except TimeoutError:
        return 0.0
    finally:
        if box.returncode is None:
            box.kill()
            await box.wait()
    if not said.startswith(b"in the box"):
        raise RuntimeError(f"no sandbox: {errors.decode()[-200:]}")
    return float(said.decode(errors="replace").endswith(f"{mark}\n"))
