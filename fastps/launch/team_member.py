# SPDX-License-Identifier: Apache-2.0
"""One worker of a team: run the driver's orders, and keep state between them.

The main thread runs calls and cells, so that Ctrl-C interrupts them and nothing else. Another
thread receives orders, and ends the process when the driver is gone. Cells run in the module
`__main__`. Entry point of a process, whose only argument is the descriptor of its socket.
"""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fastps.launch.team_protocol import pack_failure, pack_result, receive, unpack
from fastps.session import current

ORPHANED = 113  # exit code where the driver is gone


class Member:
    """The worker's side."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._orders: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._working = False  # an order runs; otherwise Ctrl-C is ignored
        self._handlers: dict[str, Callable[..., Any]] = {
            "call": call,
            "cell": run_cell,
            "join": join,
            "path": sys.path.extend,
            "get": get,
            "put": put,
        }
        threading.Thread(target=self._receive, name="fastps:driver", daemon=True).start()

    def _receive(self) -> None:
        """Receive orders until the driver is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._orders.put(receive(self._sock))
        os._exit(ORPHANED)

    def serve(self) -> None:
        """Carry out one order after the other and answer each, until the order `end`."""
        signal.signal(signal.SIGINT, self._interrupt)
        while True:
            answer = self._answer(self._orders.get())
            if answer is None:
                return
            self._sock.sendall(answer)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._working:
            self._working = False  # once for each order: its report must not be interrupted
            raise KeyboardInterrupt

    def _answer(self, order: bytearray) -> bytes | None:
        """Carry out an order and return its answer, or None for the last one."""
        try:
            try:
                self._working = True
                kind, words = unpack(order)
                return None if kind == "end" else pack_result(self._handlers[kind](*words))
            finally:
                self._working = False
        except BaseException as error:  # also Ctrl-C, and sys.exit() in a cell
            return pack_failure(error)


def join() -> None:
    """Join the job, again if this worker left it or an order was interrupted."""
    current.shutdown()
    current.init({})


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function."""
    return function(*args, **kwargs)


def get(name: str) -> Any:
    """Return a variable of the cells."""
    found = vars(sys.modules["__main__"])
    if name not in found:
        raise NameError(f"name {name!r} is not defined")
    return found[name]


def put(values: dict[str, Any]) -> None:
    """Set variables of the cells."""
    vars(sys.modules["__main__"]).update(values)


def run_cell(source: str) -> None:
    """Run statements; show the value of the last one if it is an expression, as notebooks do."""
    tree = ast.parse(source, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space = vars(sys.modules["__main__"])
    exec(compile(tree, "<cell>", "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the driver at the other end of the inherited socket."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # programs that cells start must not send this process orders
    Member(sock).serve()
    current.shutdown()


if __name__ == "__main__":
    # cells have the module __main__ to themselves
    from fastps.launch import team_member

    sys.modules["__main__"] = type(sys)("__main__")
    team_member.main()
