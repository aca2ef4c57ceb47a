# SPDX-License-Identifier: Apache-2.0
"""What no file may hold, whoever wrote it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from house_source import (
    PACKAGE,
    SOURCE_SUFFIXES,
    FunctionNode,
    code_lines,
    cython_files,
    is_cli,
    name_of,
    project_files,
    python_files,
    text_of,
    tree_of,
)

SPDX = "# SPDX-License-Identifier: Apache-2.0"
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "code",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
EVERY_ADDRESS = {"0.0.0.0", "::"}
# Written in two parts so that this file passes its own test.
MACHINE_PATHS = re.compile("(?<![\\w.])/(" + "work/|home/|root/|Users/|mnt/|tmp/" + r"bash)\w")
MARKS = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b(?!\(#\d+\))")
CYTHON_UNSAFE = re.compile(
    r"\b(eval|exec|pickle|marshal|print)\s*\(|c?import\s+(pickle|marshal)\b"
)

Fault = tuple[int, str]
Rule = Callable[[ast.AST], Iterator[Fault]]


def modules_of(node: ast.AST) -> list[str]:
    """List the modules that one import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def no_unsafe_modules(node: ast.AST) -> Iterator[Fault]:
    """Forbid what turns bytes into code."""
    for module in modules_of(node):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield node.lineno, f"imports {module}: bytes must never become code; use msgspec"


def no_unsafe_calls(node: ast.AST) -> Iterator[Fault]:
    """Forbid evaluation, shells, and loaders that unpickle."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
        yield node.lineno, f"calls {node.func.id}()"
    if ast.unparse(node.func) in ("os.system", "os.popen", "torch.load"):
        yield node.lineno, f"calls {ast.unparse(node.func)}()"
    for keyword in node.keywords:
        is_on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("shell", "allow_pickle") and is_on:
            yield node.lineno, f"passes {keyword.arg}=True"


def no_star_imports(node: ast.AST) -> Iterator[Fault]:
    """Forbid names from nowhere."""
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        yield node.lineno, "imports *; name what you need"


def no_bare_except(node: ast.AST) -> Iterator[Fault]:
    """Forbid catching what nobody thought of."""
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield node.lineno, "bare except; name the exceptions"


def no_mutable_defaults(node: ast.AST) -> Iterator[Fault]:
    """Forbid defaults that calls share."""
    if not isinstance(node, FunctionNode | ast.Lambda):
        return
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    for default in [*node.args.defaults, *node.args.kw_defaults]:
        is_call = isinstance(default, ast.Call) and ast.unparse(default.func) in (
            "list",
            "dict",
            "set",
            "bytearray",
        )
        if is_call or isinstance(default, literals):
            yield default.lineno, "mutable default; use None or a tuple"


def no_environment(node: ast.AST) -> Iterator[Fault]:
    """Forbid settings that the table does not know."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
        yield node.lineno, f"os.{node.attr}: only fastps/config reads the environment"
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        for alias in node.names:
            if alias.name in names:
                yield node.lineno, "only fastps/config reads the environment"


def no_print(node: ast.AST) -> Iterator[Fault]:
    """Forbid terminals in a library."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        yield node.lineno, "print(); use logging.getLogger(__name__)"


def no_global_state(node: ast.AST) -> Iterator[Fault]:
    """Forbid module variables that functions replace; the session is the one exception."""
    if isinstance(node, ast.Global):
        yield node.lineno, f"global {', '.join(node.names)}: let an object own it"


def no_polling(node: ast.AST) -> Iterator[Fault]:
    """Forbid sleeps as synchronisation."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
        yield node.lineno, "time.sleep(); wait on a condition with a deadline"


def no_endless_waits(node: ast.AST) -> Iterator[Fault]:
    """Forbid waiting for threads, futures and processes without a deadline."""
    waits = ("join", "result", "communicate")
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in waits:
        yield node.lineno, f".{node.func.attr}() waits for ever; give it a timeout"


def no_locks_of_python(node: ast.AST) -> Iterator[Fault]:
    """Forbid conditions and events whose locks Ctrl-C leaves held."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if called in ("threading.Condition", "threading.Event"):
        yield node.lineno, f"{called}(): fastps.native.condition has Condition and Flag"


def no_wall_clocks(node: ast.AST) -> Iterator[Fault]:
    """Forbid clocks that somebody may set, on which no deadline can stand."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    of_time = r"^time\.(time|time_ns|localtime|gmtime|ctime)$"
    if re.search(rf"{of_time}|\bdate(time)?\.(now|utcnow|today)$", called):
        yield node.lineno, f"{called}(): time.monotonic() is what deadlines go by"


def no_unbounded_names(node: ast.AST) -> Iterator[Fault]:
    """Forbid asking for names without a deadline."""
    names = ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn", "create_connection")
    if not isinstance(node, ast.Call) or any(one.arg == "sock" for one in node.keywords):
        return  # a socket has been connected to an address before
    called = ast.unparse(node.func)
    if called.rpartition(".")[2] in names:
        yield node.lineno, f"{called}() has no deadline: sockets.look_up() has"


def no_waits_for_readers(node: ast.AST) -> Iterator[Fault]:
    """Forbid that an event loop waits until a peer has read."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".drain"):
        yield node.lineno, "drain() waits for a peer that may not read"


def no_open_doors(node: ast.AST) -> Iterator[Fault]:
    """Forbid listening on every address without being asked."""
    if isinstance(node, ast.Module):
        for constant in uncompared_constants(node):
            if constant.value in EVERY_ADDRESS:
                yield constant.lineno, f"the address {constant.value!r}: bind to one interface"


def no_own_files(node: ast.AST) -> Iterator[Fault]:
    """Forbid to make files and folders without the checks of fastps/files.py."""
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func)
    given = [*node.args, *(word.value for word in node.keywords)]
    modes = [one.value for one in given if isinstance(one, ast.Constant)]
    is_written = called.rpartition(".")[2] == "open" and any(
        re.fullmatch(r"[rbt]*[wxa][bt+]*", mode) for mode in modes if isinstance(mode, str)
    )
    is_new = any("O_CREAT" in ast.unparse(one) for one in given)
    makes = ("mkdir", "makedirs", "write_text", "write_bytes", "touch")
    is_made = called.rpartition(".")[2] in makes or called in ("os.replace", "os.rename")
    if is_written or is_new or is_made:
        yield node.lineno, f"{called}(): make it through fastps/files.py"


def uncompared_constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Walk over constants, except those that something is only compared with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            yield child
        elif not isinstance(child, ast.Compare):
            yield from uncompared_constants(child)


# Files that may sleep, because there is nothing to wait on; each sleep has a deadline around it.
SLEEPERS = (
    "transport/sockets.py",  # pause before the next attempt to reach somebody
    "reduce/cache.py",  # no lock of a file has a deadline
    "launch/top.py",  # between two looks at a job, which nothing ends but the user
    "launch/processes.py",  # orphans are not our children until their parent has died
)


def exempt(path: Path) -> set[Rule]:
    """Give the rules that a file need not keep."""
    name = path.relative_to(PACKAGE).as_posix()
    allowed: set[Rule] = {no_print} if is_cli(path) else set()
    if name in ("config/__init__.py", "config/token.py"):
        allowed.add(no_environment)
    if name in SLEEPERS:
        allowed.add(no_polling)
    if name in ("bench/conditions.py", "session/steps.py"):
        allowed.add(no_wall_clocks)  # when it was measured
    if name == "transport/sockets.py":
        allowed.add(no_unbounded_names)  # look_up() itself
    if name == "launch/team_protocol.py":
        allowed.add(no_unsafe_modules)  # over a pair of sockets that only two ends ever have
    if name == "launch/team_member.py":
        allowed.add(no_unsafe_calls)  # the cells of the user's notebook
    if name in ("files.py", "reduce/cache.py", "launch/limits.py", "bench/figures.py"):
        allowed.add(no_own_files)  # itself; its own folder; /dev/null; what the user names
    if name == "session/current.py":
        allowed.add(no_global_state)
    return allowed


RULES: tuple[Rule, ...] = (
    no_unsafe_modules,
    no_unsafe_calls,
    no_star_imports,
    no_bare_except,
    no_mutable_defaults,
    no_environment,
    no_print,
    no_global_state,
    no_polling,
    no_endless_waits,
    no_locks_of_python,
    no_wall_clocks,
    no_unbounded_names,
    no_waits_for_readers,
    no_open_doors,
    no_own_files,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule):
    wrong = [
        f"{name_of(path)}:{line}: {text}"
        for path in python_files()
        if rule not in exempt(path)
        for node in ast.walk(tree_of(path))
        for line, text in rule(node)
    ]
    assert not wrong, f"{rule.__doc__}\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (no_unsafe_modules, "from pickle import loads"),
        (no_unsafe_calls, "eval('1')"),
        (no_unsafe_calls, "run('x', shell=True)"),
        (no_unsafe_calls, "np.load(f, allow_pickle=True)"),
        (no_star_imports, "from x import *"),
        (no_bare_except, "try:\n    f()\nexcept:\n    pass"),
        (no_mutable_defaults, "def f(*, a=[]): pass"),
        (no_mutable_defaults, "lambda a=dict(): a"),
        (no_environment, "os.environ['A']"),
        (no_environment, "from os import getenv"),
        (no_print, "print(1)"),
        (no_global_state, "def f():\n    global a\n    a = 1"),
        (no_polling, "time.sleep(1)"),
        (no_endless_waits, "thread.join()"),
        (no_locks_of_python, "threading.Event()"),
        (no_wall_clocks, "time.time()"),
        (no_wall_clocks, "datetime.datetime.now()"),
        (no_unbounded_names, "socket.getaddrinfo('a', 1)"),
        (no_waits_for_readers, "writer.drain()"),
        (no_open_doors, "bind(('0.0.0.0', 1))"),
        (no_own_files, "path.open('wb')"),
        (no_own_files, "open(path, mode='a')"),
        (no_own_files, "path.mkdir()"),
        (no_own_files, "os.open(path, os.O_CREAT | os.O_RDWR)"),
    ],
)
def test_each_rule_finds_its_fault(rule, source):
    assert [fault for node in ast.walk(ast.parse(source)) for fault in rule(node)]


@pytest.mark.parametrize("path", cython_files(), ids=name_of)
def test_cython_asks_no_clock_that_can_be_set(path):
    """Waits for a futex or a condition go by CLOCK_MONOTONIC as well."""
    unsure = re.compile(
        r"REALTIME|gettimeofday|\bpthread_mutex_timedlock|\bsem_timedwait|\btime\("
    )
    text = "\n".join(code_lines(path))
    assert not unsure.search(text)
    if "pthread_cond_timedwait" in text:
        assert "pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)" in text


@pytest.mark.parametrize("path", cython_files(), ids=name_of)
def test_cython_evaluates_and_prints_nothing(path):
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for number, line in enumerate(code_lines(path), 1)
        if CYTHON_UNSAFE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_sources_name_their_license():
    wrong = []
    for path in project_files():
        is_script = path.suffix in SOURCE_SUFFIXES or text_of(path).startswith("#!")
        head = text_of(path).splitlines()[:2]
        if is_script and head and SPDX not in head:
            wrong.append(name_of(path))
    assert not wrong, f"begin with {SPDX!r}: {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        (MACHINE_PATHS, "a path of one machine; make it relative or a setting"),
        (MARKS, "give it an issue number, as in (#12), or do it"),
    ],
    ids=["machine_paths", "marks"],
)
def test_text_is_free_of(pattern, advice):
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in project_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, f"{advice}\n" + "\n".join(wrong)
