"""All decisions of the agent: events in, instructions out. No IO, no clock, no asyncio; every decision takes `now`."""

from varuna_agent.state.admission import Identity
from varuna_agent.state.agent import AgentState, Timings
from varuna_agent.state.limits import NO_LIMITS, JobLimits
from varuna_agent.state.messages import stack_dump
from varuna_agent.state.stimuli import Event, Instruction, WorkerKey
from varuna_agent.state.workdir import Workdir
from varuna_agent.state.worker import IllegalTransitionError, Worker

__all__ = [
    "NO_LIMITS",
    "AgentState",
    "Event",
    "Identity",
    "IllegalTransitionError",
    "Instruction",
    "JobLimits",
    "Timings",
    "Workdir",
    "Worker",
    "WorkerKey",
    "stack_dump",
]
