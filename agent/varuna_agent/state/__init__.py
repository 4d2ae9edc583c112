"""All decisions of the agent: events in, instructions out. No IO, no clock, no asyncio; every decision takes `now`."""

from varuna_agent.state.admission import Identity
from varuna_agent.state.agent_state import AgentState, Timings
from varuna_agent.state.events import Event
from varuna_agent.state.hosted_worker import HostedWorker, IllegalPhaseChangeError
from varuna_agent.state.instructions import Instruction
from varuna_agent.state.messages import make_stack_dump
from varuna_agent.state.process_limits import NO_LIMITS, ProcessLimits
from varuna_agent.state.workdir import Workdir
from varuna_agent.state.worker_key import WorkerKey

__all__ = [
    "NO_LIMITS",
    "AgentState",
    "Event",
    "HostedWorker",
    "Identity",
    "IllegalPhaseChangeError",
    "Instruction",
    "ProcessLimits",
    "Timings",
    "Workdir",
    "WorkerKey",
    "make_stack_dump",
]
