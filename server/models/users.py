"""Who may do what: users and their secrets."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import Base, Uuid


class User(Base):
    """A person or a program with a role."""

    __tablename__ = "users"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[datetime]


class Token(Base):
    """A secret of a user, by its SHA-256; `session` tokens live in a browser's cookie."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    user_id: Mapped[str] = mapped_column(Uuid, ForeignKey("users.id", ondelete="CASCADE"), index=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str]  # api, session
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
