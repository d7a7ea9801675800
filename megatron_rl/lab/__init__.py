"""The instability lab: a paper's causal claim as arms that differ in one key, run over seeds and compared in pairs."""

from megatron_rl.lab.jobs import Job, LoadedStudy, is_study, load_study
from megatron_rl.lab.study import Study

__all__ = ["Job", "LoadedStudy", "Study", "is_study", "load_study"]
