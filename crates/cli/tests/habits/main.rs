//! The options that users know, beside the core utilities on the kernel's mount of the same volume.
//!
//! | module | judge |
//! |---|---|
//! | `look` | `ls`, `stat`, `find`, `du`, `df`, `lsattr`, `getfattr` and `btrfs filesystem du` on the mount |
//! | `change` | `chmod`, `chown`, `touch`, `mknod`, `rmdir`, `rm`, `cp` on a directory of the host; the check of the format |
//! | `generated` | the same for options in any combination |
//! | `codes` | the core utilities: the exit code of each verb and place |
//! | `said` | what messages and JSON must hold |

mod change;
mod codes;
#[path = "../shared/format.rs"]
mod format;
mod generated;
#[path = "../shared/lines.rs"]
mod lines;
mod look;
mod said;
#[path = "../shared/volumes.rs"]
mod volumes;

use format::{is_xfs, on_both};
use lines::{does, fails, offshoot, program, words};
use volumes::{check, volume};
