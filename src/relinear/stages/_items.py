"""Evaluation items, read where they lie: in an asset, or in a folder of `workflow/`. Nothing is made of
them."""

from typing import Self

from pydantic import model_validator

from relinear.plan.strict import Strict


class Options(Strict):
    asset: str | None = None
    folder: str | None = None  # below workflow/

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.asset is None) == (self.folder is None):
            raise ValueError("give either `asset` or `folder`")
        return self
