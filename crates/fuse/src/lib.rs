//! Serves a filesystem behind the traits of `offshoot-vfs` as a FUSE mount. This crate knows no
//! format.
//!
//! ```text
//! kernel -> transport -> request -> dispatch -> vfs call -> output -> transport -> kernel
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | `wire` | the protocol, byte for byte |
//! | `request`, `output` | decodes requests with every bound checked; encodes answers |
//! | `nodes` | inode numbers over all number spaces, and which files the kernel knows |
//! | `listings` | where the listings of open directories end |
//! | `mappable` | which files a program can write through a shared mapping |
//! | `dispatch` | from a request to a call, and from its result to an answer |
//! | `attributes` | attributes in the structures of the protocol |
//! | `ioctls` | ioctls that the mount passes on to the serving program |
//! | `caches` | invalidations of what the kernel caches |
//! | `device`, `ring` | how requests come and answers go: over `/dev/fuse`, and over io_uring |
//! | `idle` | the idle threads of `/dev/fuse`, and the guard that calls one when requests wait |
//! | `look` | the look for the next request at `/dev/fuse` before a thread sleeps |
//! | `cpus` | the queues that io_uring has, one for each CPU |
//! | `mount` | mounting and unmounting, as root or as a user |
//! | `helper` | mounting and unmounting by another process |
//! | `server` | the threads of a mount |
//! | `watch` | `tracing` events about requests |
//! | `options` | options of the serving program |
//!
//! Only the kernel changes what is mounted, so it may cache without a time limit: names that exist
//! and names that do not, attributes, data, the entries of directories. A program that changes the
//! filesystem beside the kernel invalidates these caches ([`KernelCaches`]).

mod attributes;
mod caches;
mod cpus;
mod device;
mod dispatch;
mod helper;
mod idle;
mod ioctls;
mod listings;
mod look;
mod mappable;
mod mount;
mod nodes;
mod options;
mod output;
mod request;
mod ring;
mod server;
mod watch;
mod wire;

pub use caches::KernelCaches;
pub use helper::{Helper, help};
pub use ioctls::{Ioctl, Ioctls};
pub use mount::{BlockMounter, MountOptions, MountPoint, Mounter, Unmount, has_ended, unmount};
pub use options::{ErrorReporter, FindDirectory, Gate, ServeOptions, ShownOwner, Transport};
pub use server::{MountControl, Server};
pub use watch::EVENT_TARGETS;
