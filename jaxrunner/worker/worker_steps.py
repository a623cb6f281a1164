"""Steps of a worker, for a scheduler of one's own; in a pipeline by rank, what ranks hand on."""

from jaxrunner.runner.step_handle import ModelRunnerOutput, StepHandle
from jaxrunner.scheduling.request import GrammarOutput, SchedulerOutput
from jaxrunner.worker.intermediate_tensors import IntermediateTensors, given
from jaxrunner.worker.lifecycle import Lifecycle


class WorkerSteps(Lifecycle):
    """The methods of vLLM's worker that run its model."""

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> IntermediateTensors | None:
        """Starts the forward pass of a step, as `ModelRunner.execute_model` does.

        intermediate_tensors: what the rank before returned, in a pipeline by rank. Returns those
        for the next rank; None on the last one, or where no token is to be computed.

        Raises:
          ValueError: they are missing, or there where they should not be.
          RuntimeError: weights or caches sleep, a step was not sampled, or the tokens of an
            earlier step of these requests are not received.
        """
        self.status.check_awake()
        x = given(self.runner.program.config, scheduler_output, intermediate_tensors)
        hidden = self.runner.execute_model(scheduler_output, *x)
        if hidden is None:
            return None
        self.runner.sample_tokens()  # awaits what the last rank samples
        return IntermediateTensors(dict(hidden_states=hidden))

    def receive_tokens(self, output: ModelRunnerOutput) -> None:
        """Takes what the last rank sampled in the oldest step that lacks it; on all other ranks.

        output: what `get` of that rank's `sample_tokens` returned.

        Raises:
          RuntimeError: no step lacks its tokens.
        """
        if output.req_ids:  # else the step had no tokens, here neither
            self.runner.state = self.runner.state.told(output.sampled_token_ids)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> StepHandle:
        """Samples that step. Returns a handle, whose `get` waits for the tokens."""
        return self.runner.sample_tokens(grammar_output)
