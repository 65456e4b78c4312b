//! The verbs that change volumes, as a user runs them. Tests of what both formats have run on both
//! ([`format`]).
//!
//! | module | judge |
//! |---|---|
//! | `coreutils` | the core utilities of the host, which do the same beside it |
//! | `onto` | the core utilities again: what `cp` does with an existing file of the host |
//! | `judged` | the check of the format, and the kernel, which mounts the result |
//! | `refused` | what must be refused: volumes in use, no space, no rights |
//! | `replaced` | an existing file stays until its replacement is complete |
//! | `properties` | `btrfs property`, `getfattr`, `fallocate`, `filefrag` on the mount of the kernel |
//! | `subvolume` | `btrfs check`, and the list of the kernel |
//! | `same` | the bytes of another run of the same verb |
//! | `scrub` | known damage, `btrfs check` |
//! | `resize` | the length of the image, `btrfs check` |
//! | `trim` | the allocated blocks of an image, `btrfs check` |

mod coreutils;
#[path = "../shared/format.rs"]
mod format;
mod judged;
#[path = "../shared/lines.rs"]
mod lines;
mod onto;
#[path = "../shared/processors.rs"]
mod processors;
#[path = "../shared/program.rs"]
mod program;
mod properties;
mod refused;
mod replaced;
mod resize;
mod same;
mod scrub;
#[path = "../shared/shuffled.rs"]
mod shuffled;
mod subvolume;
mod trim;
#[path = "../shared/volumes.rs"]
mod volumes;

use format::on_both;
use lines::{does, fails, offshoot, program, words};
use volumes::{check, volume};
