"""What the host knows of a request that has a slot in the device's tables."""

from dataclasses import dataclass
from typing import NamedTuple


class Needs(NamedTuple):
    """What a request's parameters ask of the programs."""

    all_rules: bool  # logprobs, or rules that few requests ask for
    single_steps: bool  # a grammar, or logprobs of all tokens: the host works between its tokens
    num_logprobs: int  # columns, 0 for none
    num_prompt_logprobs: int


class PendingPromptLogprobs(NamedTuple):
    """Which prompt tokens of a request are still to be scored. Positions."""

    computed: int
    start: int
    stop: int

    @property
    def num_left(self) -> int:
        """Targets that no step has scored; each follows a token that is not computed."""
        return max(0, self.stop - max(self.start, self.computed + 1))

    def after(self, num_tokens: int) -> "PendingPromptLogprobs":
        """Returns what is left once `num_tokens` more are computed."""
        return self._replace(computed=self.computed + num_tokens)


@dataclass
class Slot:
    """What the host knows of a request that has a slot."""

    index: int  # of its row in the device's table
    num_blocks: list[int]  # by cache group
    needs: Needs
    prompt_logprobs: PendingPromptLogprobs

    @property
    def is_usual(self) -> bool:
        """Whether the programs of usual requests serve it from now on."""
        needs = self.needs
        return not (needs.all_rules or needs.single_steps or self.prompt_logprobs.num_left)
