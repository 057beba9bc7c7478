/* The one definition of the generated option table. */
#define FT_DEFINE_OPTIONS
#include "ft_options.h"
