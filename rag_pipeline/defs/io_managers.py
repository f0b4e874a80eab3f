"""Tables between assets as Parquet files, so that anyone can open and inspect them."""

import dagster as dg
import pandas as pd
from upath import UPath

from rag_pipeline.defs.metadata import column_schema
from rag_pipeline.tables import from_parquet, to_parquet


class ParquetIOManager(dg.UPathIOManager):
    """One Parquet file an asset; an equal table is not written again."""

    extension = ".parquet"

    def dump_to_path(self, context: dg.OutputContext, obj: pd.DataFrame, path: UPath) -> None:
        """Write the table aside and move it into place."""
        data = to_parquet(obj)
        if path.exists() and path.read_bytes() == data:
            context.log.info(f"{path} holds an equal table; nothing is written.")
            return
        aside = path.with_name(f".{path.name}.aside")
        aside.write_bytes(data)
        aside.rename(path)

    def load_from_path(self, context: dg.InputContext, path: UPath) -> pd.DataFrame:
        """Read the table."""
        del context
        return from_parquet(path.read_bytes())

    def get_metadata(self, context: dg.OutputContext, obj: pd.DataFrame) -> dict[str, dg.MetadataValue]:
        """What Dagster shows of every table: its rows and columns."""
        del context
        return {
            "dagster/row_count": dg.MetadataValue.int(len(obj)),
            # As "dagster/column_schema" it would stand above all other metadata of the page.
            "columns": dg.MetadataValue.table_schema(column_schema(obj)),
        }
