"""The padded sizes of launches, and the most that one takes."""

from typing import NamedTuple

from jaxrunner.api.sampling_params import MAX_IDS, MAX_LOGPROB_IDS

MAX_TARGETS = 256  # prompt tokens that one launch scores
MAX_STOP_IDS = 144  # of a request: its own, and the model's EOS
FEW_STOP_IDS = 16  # of a request whose admission is not wide
SHORT_LEN = 1536  # tokens: keys that a cluster of blocks of decode attention reads, at most
# Axes of lists of ids that few requests have: an admission that is not wide leaves them out.
WIDE = dict(allowed=MAX_IDS, biased=MAX_IDS, words=MAX_IDS, named=MAX_LOGPROB_IDS, extra=16)


class Bucket(NamedTuple):
    """The padded size of a step."""

    num_tokens: int  # T
    num_rows: int  # B
    query_len: int = 0  # tokens of every row, 0 if rows differ
    num_drafts: int = 0  # K: most drafts that a row verifies, and that are proposed for it
    lora: bool = False  # whether a request has an adapter
    short: bool = False  # whether no request has more than `SHORT_LEN` tokens


class SampleSize(NamedTuple):
    """The padded size of sampling, and what is compiled into it."""

    num_rows: int  # B
    all_rules: bool = False  # whether the rules that few requests have are compiled in
    num_logprobs: int = 0  # C, 0 for no logprobs
    num_drafts: int = 0  # K: most drafts that a row verifies


class MultiStepBucket(NamedTuple):
    """The padded size of several decode steps in one launch."""

    num_steps: int
    sample: SampleSize  # of each step
    lora: bool = False  # as in `Bucket`, as is `short`
    short: bool = False

    @property
    def num_rows(self) -> int:
        """Requests, B."""
        return self.sample.num_rows

    @property
    def bucket(self) -> Bucket:
        """The size of each step."""
        B, K = self.num_rows, self.sample.num_drafts
        return Bucket(B * (1 + K), B, 1 + K, K, self.lora, self.short)

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return self.num_steps * self.bucket.num_tokens


class PromptLogprobsSize(NamedTuple):
    """The padded size of a launch that computes logprobs of prompt tokens."""

    num_tokens: int  # T
    num_targets: int  # U
    num_logprobs: int  # C
    lora: bool = False  # whether a request has an adapter, which may have a head


class AdmitSize(NamedTuple):
    """The padded size of an admission."""

    num_rows: int  # A
    num_writes: int  # W
    wide: bool = False  # whether it has room for the `WIDE` lists and many stop ids


class CopySize(NamedTuple):
    """The padded size of a launch that copies KV blocks."""

    num_copies: int  # C


COPIES = CopySize(8)  # more are copied in several launches
