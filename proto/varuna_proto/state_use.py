"""What becomes of workers' state when their generation stops, as `Stop` says it."""

from __future__ import annotations

from dataclasses import dataclass

OTHER_STAGES = "in other stages: "
"""How a worker's reason begins why it cannot go on in place, if it could with the stage that it has."""

ACCUMULATES = "the script accumulates gradients; a larger global batch does the same"
OWN_GROUPS = "the script has process groups of its own; without them, step() returns the loss over all ranks"
NEVER_IN_PLACE = frozenset({ACCUMULATES, OWN_GROUPS})
"""Those of a worker's reasons that keep it even from ending the step under way in place."""


@dataclass(frozen=True, kw_only=True)
class StateUse:
    """Of the workers on one VM."""

    keep: bool = False
    """Processes that can stay hold it for the next generation."""
    in_place: bool = False
    """After a hold-first stop they are to go on in place; where one of them cannot, all save."""
    within_step: bool = False
    """At a hold-first stop they leave in the middle of the step, with what they have of it, if all of them can."""
    spare: bool = False
    """Other VMs hold the same: it need not be saved, even if a process may not stay."""
    store: bool = False
    """With `keep`: it goes to memory that outlives the processes, which end."""
