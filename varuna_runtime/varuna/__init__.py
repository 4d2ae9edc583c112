"""Varuna: train PyTorch models too large for one GPU on spot VMs. What training scripts import."""

from varuna import data
from varuna.cut_point import CutPoint
from varuna.departure import GenerationEnded, PeerLost
from varuna.launch import get_this_rank_config_varuna, get_varuna_config
from varuna.profiler import Profiler
from varuna.training import Varuna

__all__ = [
    "CutPoint",
    "GenerationEnded",
    "PeerLost",
    "Profiler",
    "Varuna",
    "data",
    "get_this_rank_config_varuna",
    "get_varuna_config",
]
