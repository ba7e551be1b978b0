"""What every table is made of: the base class, aware UTC times, JSON as text, keys, and the flags of null numbers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, DateTime, Dialect, Float, Integer, MetaData, String, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase

# values of `flag` columns: what a null value was
FINITE, NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY = 0, 1, 2, 3


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time on every database; a naive one is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, f"naive time {value}"
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """A JSON value as text: the same bytes on every database; NaN is refused; None is SQL's null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, allow_nan=False, separators=(",", ":"))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


Uuid = String(36)
BigKey = BigInteger().with_variant(Integer, "sqlite")  # SQLite gives row numbers to INTEGER keys only


class Base(DeclarativeBase):
    """Base of every table."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcTime, str: Text, int: BigInteger, float: Float(53), bool: Boolean}  # noqa: RUF012
