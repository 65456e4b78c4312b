//! What verbs show that only XFS has.

pub(super) mod dump;
pub(super) mod info;
