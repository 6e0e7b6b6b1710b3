"""Eight CPU devices, strict types, and shapes checked at run time."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook("jaxcode", "beartype.beartype")
