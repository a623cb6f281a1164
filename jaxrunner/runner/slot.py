"""The host's record of a request that has a slot in the device's tables."""

from dataclasses import dataclass
from typing import NamedTuple


class Needs(NamedTuple):
    """The features of programs that a request's parameters need."""

    all_rules: bool  # logprobs, or rules that few requests have
    single_steps: bool  # a grammar, or logprobs of all tokens: one step a launch
    num_logprobs: int  # columns, 0 for none
    num_prompt_logprobs: int


class PendingPromptLogprobs(NamedTuple):
    """Prompt tokens of a request whose logprobs are still to come. All are positions."""

    computed: int  # of the next token to compute
    start: int  # of the first token with a logprob
    stop: int  # behind the last

    @property
    def num_left(self) -> int:
        """Prompt tokens without a logprob yet: those that follow a token that is not computed."""
        return max(0, self.stop - max(self.start, self.computed + 1))

    def after(self, num_tokens: int) -> "PendingPromptLogprobs":
        """Returns what is still to come once `num_tokens` more are computed."""
        return self._replace(computed=self.computed + num_tokens)


@dataclass
class Slot:
    """The host's record of a request that has a slot."""

    index: int  # of its row in the device's table
    num_blocks: list[int]  # by cache group
    needs: Needs
    prompt_logprobs: PendingPromptLogprobs

    @property
    def is_usual(self) -> bool:
        """Whether programs without rare rules and prompt logprobs serve it from now on."""
        needs = self.needs
        return not (needs.all_rules or needs.single_steps or self.prompt_logprobs.num_left)
