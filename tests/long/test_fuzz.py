"""Hypothesis walks over training loops on two ranks, and compares with the oracle after every action.

A failure prints the shortest list of actions that it could find.  ``DDP_MP_FUZZ=<minutes>`` walks for so long, by
other seeds in every run, and prints how far it came; otherwise some hundred actions, the same in every run.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from kit.ranks import Conversation, Rank
from kit.walk import ACTIONS, BUILDS, MODELS, Walk

MINUTES = float(os.environ.get("DDP_MP_FUZZ", "0"))


def walk(rank: Rank) -> None:
    """One walk on a rank."""
    walking = Walk(rank)
    try:
        for action, arguments in rank.heard():
            walking.do(action, arguments)
    finally:
        walking.close()


def choices(of: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: st.sampled_from(values) for name, values in of.items()}


class Training(RuleBasedStateMachine):
    """Whatever a user may do, in any order."""

    said: ClassVar[dict[str, int]] = {}
    walks: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.conversation: Conversation | None = Conversation(2, walk)
        type(self).walks += 1

    def say(self, action: str, arguments: dict[str, Any]) -> None:
        conversation, self.conversation = self.conversation, None
        assert conversation is not None
        conversation.say((action, arguments))
        self.conversation = conversation  # it goes on
        self.said[action] = self.said.get(action, 0) + 1

    def teardown(self) -> None:
        if self.conversation is not None:
            self.conversation.end()

    @initialize(**{f"model_{k}": st.fixed_dictionaries(choices(BUILDS)) for k in range(MODELS)})
    def start(self, **models: dict[str, Any]) -> None:
        for number, build in enumerate(models.values()):
            self.say("build", {"model": number, **build})


def _rule(action: str, arguments: dict[str, list[Any]]) -> Any:
    def act(self: Training, **chosen: Any) -> None:
        self.say(action, chosen)

    act.__name__ = action
    return rule(model=st.sampled_from(range(MODELS)), **choices(arguments))(act)


#: How often an action is among the rules, where not once.
OFTEN = {"forward": 4, "backward": 3, "evaluate": 2, "write": 2}

for _action, _arguments in ACTIONS.items():
    for _number in range(OFTEN.get(_action, 1)):
        setattr(Training, f"act_{_action}_{_number}", _rule(_action, _arguments))


def settled(walks: int, steps: int, **more: Any) -> settings:
    return settings(
        max_examples=walks,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 300)
def test_fuzz_any_order_of_actions_equals_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    if not MINUTES:
        run_state_machine_as_test(Training, settings=settled(20, 40, derandomize=True))
        return
    end, phases = time.monotonic() + 60 * MINUTES, (Phase.generate, Phase.shrink)
    try:
        while time.monotonic() < end:
            run_state_machine_as_test(Training, settings=settled(20, 100, phases=phases))
    finally:
        with capsys.disabled():
            print(f"\n{Training.walks} walks, {sum(Training.said.values())} actions: {Training.said}")
