//! The verbs that change volumes, as a user runs them.
//!
//! | module | judge |
//! |---|---|
//! | `coreutils` | the core utilities of the host, which do the same beside it |
//! | `onto` | the core utilities again: what `cp` does with an existing file of the host |
//! | `judged` | `btrfs check`, and the kernel, which mounts the result |
//! | `refused` | what must be refused: volumes in use, no space, no rights |
//! | `replaced` | an existing file stays until its replacement is complete |
//! | `properties` | `btrfs property`, `getfattr`, `fallocate`, `filefrag` on the mount of the kernel |
//! | `subvolume` | `btrfs check`, and the list of the kernel |
//! | `scrub` | known damage, `btrfs check` |
//! | `trim` | the allocated blocks of an image, `btrfs check` |

mod coreutils;
mod judged;
#[path = "../shared/lines.rs"]
mod lines;
mod onto;
#[path = "../shared/program.rs"]
mod program;
mod properties;
mod refused;
mod replaced;
mod scrub;
mod subvolume;
mod trim;

use std::path::Path;

use lines::{does, fails, offshoot, program, words};
use offshoot_testkit::run::{run, try_run};

/// A new volume `name` of `mib` MiB in `dir`.
fn volume(dir: &Path, name: &str, mib: u64) {
    does(dir, &format!("mkfs {name} --size {mib}M"));
}

/// Runs `btrfs check` on a volume, if this machine has it.
#[track_caller]
fn check(image: &Path) {
    if try_run("btrfs", &["--version"]).is_ok() {
        run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    }
}
