"""What a rank's process is told when it is started. No torch here: the supervisor writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from novainfer.config import ServeConfig
from novainfer.transport.addresses import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank of which tensor-parallel group."""

    rank: int
    world_size: int
    epoch: int
    meeting_point: str  # path of a file, see `TensorParallel.init`; unused with one rank
    known: Sequence[str] = ()  # fingerprints: the group's must be one of them, if there are any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """Everything a rank needs to start; travels as JSON."""

    config: ServeConfig
    replica: int
    place: RankPlace
    scheduler: Endpoint  # the worker socket of scheduler `replica`
    supervisor: Endpoint | None  # None: nobody listens

    def to_json(self) -> str:
        """For the rank's process; `from_json` gives an equal object."""
        return json.dumps(
            {
                "config": self.config.to_json(),
                "replica": self.replica,
                "place": asdict(self.place),
                "scheduler": self.scheduler.to_json(),
                "supervisor": None if self.supervisor is None else self.supervisor.to_json(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RankLaunch:
        """Undo `to_json`."""
        data = json.loads(text)
        return cls(
            config=ServeConfig.from_json(data["config"]),
            replica=data["replica"],
            place=RankPlace(**{**data["place"], "known": tuple(data["place"]["known"])}),
            scheduler=Endpoint.from_json(data["scheduler"]),
            supervisor=None if data["supervisor"] is None else Endpoint.from_json(data["supervisor"]),
        )
