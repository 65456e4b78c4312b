//! A filesystem behind the traits of `offshoot-vfs` as a FUSE mount. Which filesystem that is, is
//! not known here.
//!
//! ```text
//! kernel <-> transport -> request (decoded) -> dispatch -> vfs call -> output (encoded) -> transport <-> kernel
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | `wire` | the protocol, byte for byte |
//! | `request`, `output` | requests taken apart with every bound checked; answers put together |
//! | `nodes` | inode numbers over all number spaces, and which files the kernel knows |
//! | `listings` | where the listings of open directories end |
//! | `mappable` | which files may be written to through a mapping |
//! | `dispatch` | from a request to a call, and from its result to an answer |
//! | `attributes` | attributes as the protocol has them |
//! | `ioctls` | what whoever serves the filesystem may be asked through it |
//! | `caches` | what the kernel is told to forget |
//! | `device`, `ring` | how requests come and answers go: over `/dev/fuse`, and over io_uring |
//! | `cpus` | the queues that io_uring has, one for each CPU |
//! | `mount` | mounting and unmounting, as root or as a user |
//! | `helper` | the same by another process |
//! | `server` | the threads of a mount |
//! | `options` | what whoever mounts it decides |
//!
//! Nobody but the kernel changes what is mounted, so it may believe what it was told for as long as
//! it likes: names that are there and names that are not, attributes, data, the entries of
//! directories. Who changes something all the same tells it ([`KernelCaches`]).

mod attributes;
mod caches;
mod cpus;
mod device;
mod dispatch;
mod helper;
mod ioctls;
mod listings;
mod mappable;
mod mount;
mod nodes;
mod options;
mod output;
mod request;
mod ring;
mod server;
mod wire;

pub use caches::KernelCaches;
pub use helper::{Helper, help};
pub use ioctls::{Ioctl, Ioctls};
pub use mount::{MountOptions, MountPoint, Mounter, Unmount, unmount};
pub use options::{Find, Gate, Owner, Reporter, ServeOptions, Transport};
pub use server::{Control, Server};
