//! What verbs show and take that only XFS has.

pub(super) mod build;
pub(super) mod check;
pub(super) mod dump;
pub(super) mod info;
pub(super) mod mkfs;
pub(super) mod rescue;
pub(super) mod resize;
