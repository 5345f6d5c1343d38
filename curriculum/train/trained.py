"""A run's model and parameters, loaded after training, for evals and generation."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from curriculum.errors import InputError
from curriculum.find_checkpoint import architecture_at
from curriculum.model.model import Model, Params, abstract_params
from curriculum.model.presets import HOW, ModelConfig
from curriculum.model.transformer import transformer
from curriculum.record.wording import mesh_text
from curriculum.saved_weights import Saved
from curriculum.schema.adaptation import resolved_model
from curriculum.schema.sections import MeshConfig
from curriculum.train.bases import whole_params
from curriculum.train.device import cache_compiled, check_platform, tune_device
from curriculum.train.mesh import abstract_on_mesh, make_mesh


class Trained(NamedTuple):
    """A run's whole parameters, with model and mesh; `unfit_mesh`: why that is not the run's own, else None."""

    mesh: Mesh
    model: Model
    params: Params
    unfit_mesh: str | None


def load_trained(saved: Saved, store_dir: str | Path) -> Trained:
    """Load the whole parameters onto the mesh of the run or, if that does not fit, onto one of data alone.

    Raises InputError if they cannot be read, or if the frozen parameters beside adapters are gone.
    """
    config, vocab_size = saved.config, saved.tokenizer.vocab_size
    tune_device(config.train.deterministic)
    check_platform()
    cache_compiled(store_dir)
    unfit_mesh = None
    try:
        mesh = make_mesh(config.mesh)
    except InputError:
        mesh = make_mesh(MeshConfig())
        unfit_mesh = f"the run's mesh ({mesh_text(asdict(config.mesh))}) does not fit the devices here"
    if saved.make_model is None:
        # The architecture as it was trained, whatever the config resolves to now; how it is computed is the config's.
        configured = resolved_model(config, vocab_size)
        how = {name: getattr(configured, name) for name in HOW}
        architecture = replace(ModelConfig.of(architecture_at(saved.ledger, saved.step)), **how)
        model = transformer(architecture)
    else:
        architecture, model = None, saved.make_model(vocab_size)
    like = abstract_on_mesh(mesh, abstract_params(model))
    params = whole_params(config, architecture, saved.ledger["lineage"], saved.arrays, like)
    return Trained(mesh, model, params, unfit_mesh)
