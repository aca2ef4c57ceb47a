# SPDX-License-Identifier: Apache-2.0
# The Python face of _floats; stubtest compares it with the module. The docstrings are there.

from typing import final

@final
class DefaultFloats:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
