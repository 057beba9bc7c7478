/*
 * What the plugin does where jobs are submitted (sbatch, salloc, and srun outside an allocation)
 * and in the job's steps. One function per moment; plugin.c only dispatches to them.
 */
#ifndef FT_SUBMIT_H
#define FT_SUBMIT_H

#include <stdbool.h>

#include <slurm/spank.h>

/* Register every option. In passive mode they are accepted and forgotten. */
int ft_register_options(spank_t spank, bool passive);

/* After the last option: fill from the environment, hand over to slurmctld, tell the job. Ends the
 * process where the submission must be refused. */
void ft_submit_finish(spank_t spank);

/* In a step: tell the task's environment what the command line said, and which job it is of. Never
 * fails. */
void ft_step_environment(spank_t spank);

/* Forget everything (the process may load the stack again). */
void ft_reset(void);

#endif
