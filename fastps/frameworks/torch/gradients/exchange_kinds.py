# SPDX-License-Identifier: Apache-2.0
"""Which class an exchange of gradients has: another in an elastic job, chosen when it is made."""

from __future__ import annotations

from typing import TypeVar

from fastps.frameworks.torch.gradients.exchange import GradientExchange
from fastps.session import current

E = TypeVar("E", bound=GradientExchange)


def kind_of(kind: type[E]) -> type[E]:
    """Return the class to use for an exchange: in an elastic job, one whose steps are units."""
    if not current.current().is_elastic:
        return kind
    from fastps.frameworks.torch.gradients.elastic_step import elastic_kind  # noqa: PLC0415

    return elastic_kind(kind)
