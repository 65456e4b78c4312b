//! Images that are damaged.
