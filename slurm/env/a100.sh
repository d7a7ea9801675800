# shellcheck shell=bash
# A site file for nodes of eight A100 GPUs: copy it, change it, then `export MRL_SITE=/path/to/your-copy.sh`.
# slurm/submit.sh and every job source it. Nothing in it changes what is computed.

# The Python with requirements.txt installed, as compute nodes see it; inside MRL_CONTAINER, the image's own.
# export MRL_PYTHON=/shared/envs/megatron_rl/bin/python

# Containers: an image for pyxis (.sqsh or a registry reference) or apptainer (.sif). The checkout and the folder you
# submit from are mounted; name what else is needed (models, data, runs) as SOURCE:TARGET, separated by commas.
# export MRL_CONTAINER=/shared/images/megatron_rl.sqsh
# export MRL_MOUNTS=/shared/models:/shared/models,/scratch:/scratch

# Fast storage of the node itself, for compilers' caches; and what must be free there and where runs go.
# export MRL_LOCAL_DIR=/local/scratch
export MRL_MIN_FREE_GIB=${MRL_MIN_FREE_GIB:-200}

# NCCL finds InfiniBand and NVLink by itself on most systems. Set these where nodes have several networks.
# export NCCL_SOCKET_IFNAME=eth0     # the interface of the bootstrap connection
# export GLOO_SOCKET_IFNAME=eth0     # the same for gloo, which carries rollouts and checkpoints' metadata
# export NCCL_IB_HCA=mlx5            # adapters that carry traffic

# Many A100 systems have adapters that are for storage only: name those of the compute fabric, then (NCCL_IB_HCA).

# Before Blackwell, tensor parallelism overlaps communication with computation only with one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# For slurm/submit.sh; sbatch reads them, too, where they are in your environment.
# export SBATCH_ACCOUNT=… SBATCH_PARTITION=… SBATCH_TIMELIMIT=24:00:00
