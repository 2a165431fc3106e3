"""How many Groups to lease and to start: the arithmetic of capacity, kept apart from whoever acts on it."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Demand:
    """What is wanted now.

    Attributes:
      leases: Groups to lease.
      starts: Groups to start, beyond those that are prepared or on their way there. Free permits bound it further.
    """

    leases: int
    starts: int


@frozen(kw_only=True)
class Standing:
    """Where a run stands.

    Attributes:
      debt: scored Groups that open partitions still need; 0 between steps.
      margin: Groups at work beyond the debt (oversampling).
      n_leased: Groups with a lease that are not scored yet, those in Reward included.
      n_unleased: resident Groups without a lease.
      next_work: Groups at work that the next step begins with; 0 without prelaunch or after the last step.
      n_surplus: scored Groups that wait for the next partition.
      retains: whether leased Groups outlive the close of a step.
    """

    debt: int
    margin: int
    n_leased: int
    n_unleased: int
    next_work: int
    n_surplus: int
    retains: bool


def demand(at: Standing) -> Demand:
    """What the standing asks for.

    leases = margin + debt - leased, as long as there is a debt: with every Group that pays, one less is at work.
    The next step needs what is left of its work when the Groups that are kept for it and the surplus are counted;
    prepared Groups serve the current step first.
    """
    leases = max(0, at.margin + at.debt - at.n_leased) if at.debt else 0
    kept = max(0, at.n_leased - at.debt) + at.n_surplus if at.retains else 0
    ahead = max(0, at.next_work - kept)
    return Demand(leases=leases, starts=max(0, leases + ahead - at.n_unleased))
