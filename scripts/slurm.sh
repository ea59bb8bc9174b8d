#!/bin/bash
# Start one worker per task. When its time is up the job is queued again and resumes by itself:
#   sbatch scripts/slurm.sh model=resnet18                                                   one task on one node
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 scripts/slurm.sh model=resnet18   eight tasks, one per GPU
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python src/train.py strategy=ddp "$@"
