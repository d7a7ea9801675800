"""The instability lab: tests a paper's causal claim with arms that differ in one key, paired by seed."""

from megatron_rl.instruments.lab.jobs import Job, LoadedStudy, is_study, load_study
from megatron_rl.instruments.lab.study import Study

__all__ = ["Job", "LoadedStudy", "Study", "is_study", "load_study"]
