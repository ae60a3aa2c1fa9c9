"""The ranks of an exchange: which they are, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from sparcel import cost
from sparcel.comm import Call, Communicator, ranks_with_other
from sparcel.errors import InputError, MismatchError
from sparcel.rates import Rates
from sparcel.schemes import Scheme
from sparcel.training.policy import Treatment
from sparcel.training.shard import Shard


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that exchange the tensors of a training, and what they ask one another.

    All ranks call each method but `close`.

    Attributes
    ----------
    comm
        The ranks that average the same tensors.
    everyone
        The ranks on which steps take effect together: ``comm``, or with shards the ranks of all
        shards.
    shard
        Which shard of the tensors this rank holds; None for all of them.
    owned
        What `close` ends: ``everyone``, if it was made for this exchange; else None.
    """

    comm: Communicator
    everyone: Communicator
    shard: Shard | None
    owned: Communicator | None

    def tell(self, what: str, number: int = 0, **facts: object) -> list[int]:
        """Return the numbers of all ranks, once all of them have made this very call.

        Raises
        ------
        MismatchError
            On all ranks, when they make different calls, or one with different facts.
        CommunicationError
            When a rank fails.
        """
        everyone = self.everyone
        return everyone.call(Call.of(what, facts), lambda: everyone.gather_numbers(number))

    def agree_on_finite(self, finite: bool, step: int) -> bool:
        """Return whether a step was finite on the ranks of all shards, inside a job.

        The ranks that average the same shard know it of one another.
        """
        return all(self.tell("agree", int(finite), step=step))

    def check_alike(
        self, scheme: Scheme, settings: tuple[object, ...], treatment: Treatment
    ) -> None:
        """Raise `MismatchError` on all ranks unless they average the same.

        Ranks that differ would hang or misread each other. ``settings`` are those that the scheme
        and the treatment do not tell. The shapes of shards are compared where they are the same.
        """
        layout = [
            (name, tensor.dtype, name in treatment.eligible, name in treatment.rows)
            for name, tensor in treatment.tensors.items()
        ]
        shapes = [tensor.shape for tensor in treatment.tensors.values()]
        densities = sorted(treatment.own_densities.items())
        same = repr((scheme, settings, layout, densities, treatment.scope))
        places = self._places()
        others = ranks_with_other(same, self.everyone)
        others += [places[rank] for rank in ranks_with_other(repr(shapes), self.comm)]
        others = sorted(set(others))
        if any(self.everyone.run(lambda: self.everyone.gather_numbers(len(others)))):
            found = f"ranks {others} average" if others else "ranks of another shard average"
            raise MismatchError(
                f"{found} something else than rank {self.everyone.rank}, which has {scheme}"
                f" for {len(treatment.tensors)} tensors, {len(treatment.small)} of them small, and"
                f" scope {treatment.scope!r}; give every rank the same scheme, settings, policy,"
                " densities, scope, carrier and tensors, and a scaler and rates to all or to none"
            )

    def _places(self) -> list[int]:
        """Return which ranks of ``everyone`` those of ``comm`` are."""
        if self.shard is None:
            return list(range(self.comm.size))
        everyone, number = self.everyone, self.shard.number
        numbers = everyone.run(lambda: everyone.gather_numbers(number))
        return [rank for rank, one in enumerate(numbers) if one == number]

    def connect_nodes(self, scheme: Scheme) -> None:
        """Make the connections between nodes that a scheme needs.

        Raises
        ------
        InputError
            On all ranks, when nodes have different numbers of ranks. The ranks can go on: only an
            error that leaves a job ends the communicator.
        """
        refusals: list[InputError] = []

        def connect() -> None:
            try:
                scheme.connect(self.comm)
            except InputError as error:
                refusals.append(error)

        self.comm.run(connect)
        if refusals:
            raise refusals.pop()  # which refers to this call, and no variable of it to the error

    def take_rates(self, rates: Rates | str | PathLike[str]) -> None:
        """Give the communicators these rates, and raise `MismatchError` if ranks have others."""
        everyone = self.everyone
        found = cost.rates_for(everyone, rates)
        if others := ranks_with_other(found.to_json(), everyone):
            raise MismatchError(
                f"ranks {others} have other rates than rank {everyone.rank}; give all ranks the"
                " same file"
            )
        everyone.rates = found
        if self.shard is not None:  # ranks of other shards use the same links at the same time
            self.comm.rates = found.across_nodes()

    def close(self) -> None:
        """End the communicator if it was made for this exchange."""
        if self.owned is not None:
            self.owned.close()
