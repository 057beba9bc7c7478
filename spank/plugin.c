/*
 * slurm-ext's SPANK plugin: dispatches Slurm's moments to the files beside it.
 *
 * Options are registered in every context, because a context that does not know an option of a
 * submission complains about it. On a compute node every answer is 0: an error there can drain the
 * node. plugstack.conf arguments: "passive" accepts every --ft-* option and ignores it, so that
 * scripts keep working where slurm-ext is switched off.
 */
#include <stdbool.h>
#include <string.h>

#include <slurm/spank.h>

#include "submit.h"

#pragma GCC visibility push(default)

SPANK_PLUGIN(slurm_ext, 1);

int slurm_spank_init(spank_t spank, int ac, char *av[]);
int slurm_spank_init_post_opt(spank_t spank, int ac, char *av[]);
int slurm_spank_user_init(spank_t spank, int ac, char *av[]);
int slurm_spank_exit(spank_t spank, int ac, char *av[]);

#pragma GCC visibility pop

static bool submits(void)
{
    enum spank_context context = spank_context();
    return context == S_CTX_ALLOCATOR || context == S_CTX_LOCAL;
}

static bool is_passive(int ac, char *av[])
{
    for (int i = 0; i < ac; i++)
        if (strcmp(av[i], "passive") == 0)
            return true;
    return false;
}

int slurm_spank_init(spank_t spank, int ac, char *av[])
{
    for (int i = 0; submits() && i < ac; i++)
        if (strcmp(av[i], "passive") != 0)
            slurm_error("slurm-ext: plugstack.conf argument \"%s\" is unknown and ignored; the "
                        "only one is \"passive\"",
                        av[i]);
    ft_reset();
    int rc = ft_register_options(spank, is_passive(ac, av));
    return submits() ? rc : 0;
}

int slurm_spank_init_post_opt(spank_t spank, int ac, char *av[])
{
    if (submits() && !is_passive(ac, av))
        ft_submit_finish(spank);
    return 0;
}

int slurm_spank_user_init(spank_t spank, int ac, char *av[])
{
    if (!is_passive(ac, av))
        ft_step_environment(spank);
    return 0;
}

int slurm_spank_exit(spank_t spank, int ac, char *av[])
{
    (void)spank;
    (void)ac;
    (void)av;
    ft_reset();
    return 0;
}
