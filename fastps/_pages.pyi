# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any, final

SETTING: Path

def may_gather(setting: Path = ...) -> bool: ...

@final
class HugePages:
    bytes_gathered: int
    def __init__(self, first: int = 0, nbytes: int = 0) -> None: ...
    def see(self, array: Any) -> None: ...
