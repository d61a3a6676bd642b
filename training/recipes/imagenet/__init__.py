"""ImageNet: classification of pictures of any size, on every worker a whole model. The loop is
``loop.py``."""

from typing import Final

from training.recipes.imagenet.settings import PRESETS, SYNTHETIC, ImagenetConfig
from training.recipes.recipe import Recipe
from training.record.events import ACCURACY, Measure

#: Share of the pictures whose class is among the five most likely.
TOP5: Final = Measure(name="top5", label="top-5", form="percent")

RECIPE: Final = Recipe(
    name="imagenet",
    config=ImagenetConfig,
    presets=PRESETS,
    built_in_data=SYNTHETIC,
    built_in_preset="synthetic",
    data_help="folder or s3:// address of pictures: train/<class>/ and val/<class>/, or what "
    "trainctl data prepare imagenet has made of them (default: pictures made on the device)",
    data_kind="pictures",
    inputs="training.recipes.imagenet.inputs",
    loop="training.recipes.imagenet.loop",
    preload=(
        "torch._dynamo",  # torch's optimizers and DDP import it
        "transformers.models.resnet.modeling_resnet",
        "transformers.models.efficientnet.modeling_efficientnet",
    ),
    measures=(ACCURACY, TOP5),
)
