//! Options in the form of `mount -o`.
//!
//! | options | what becomes of them |
//! |---|---|
//! | what the engine or the kernel does | they are done |
//! | of mount alone (`noauto`, `_netdev`, `x-...`), or what is so anyway (`noatime`, `default_permissions`) | they are let be |
//! | of the kernel's btrfs, or `writeback`, but not done here | they are refused by name, as not supported |
//! | all others | wrong usage; let be where mount asks for that |

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use offshoot_btrfs::{Compress, NewFiles};
use offshoot_fuse::{Owner, Transport};
use offshoot_vfs::Error;

use crate::exit::{Failure, Result};

/// What somebody who mounts a volume wants.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct Wanted {
    pub(crate) read_only: bool,
    pub(crate) suid: bool,
    pub(crate) dev: bool,
    pub(crate) exec: bool,
    pub(crate) allow_other: bool,
    pub(crate) degraded: bool,
    pub(crate) remount: bool,
    /// What the process does not need while it serves is taken from it.
    pub(crate) sandbox: bool,
    pub(crate) owner: Owner,
    pub(crate) transport: Transport,
    pub(crate) subvolume: Option<OsString>,
    pub(crate) compress: Option<Compress>,
    pub(crate) new_files: NewFiles,
    pub(crate) max_inline: Option<u64>,
    pub(crate) commit: Option<Duration>,
    /// Whether fsync writes the tree log instead of committing.
    pub(crate) tree_log: bool,
    pub(crate) discard: bool,
    pub(crate) flush_on_commit: bool,
    pub(crate) devices: Vec<PathBuf>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            read_only: false,
            suid: false,
            dev: false,
            exec: true,
            allow_other: false,
            degraded: false,
            remount: false,
            sandbox: true,
            owner: Owner::default(),
            transport: Transport::default(),
            subvolume: None,
            compress: None,
            new_files: NewFiles::default(),
            max_inline: None,
            commit: None,
            tree_log: true,
            discard: false,
            flush_on_commit: false,
            devices: Vec::new(),
        }
    }
}

/// What says nothing to this program, or what is so anyway.
const LET_BE: [&str; 29] = [
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "silent",
    "loud",
    "async",
    "noatime",
    // The kernel keeps no access times of what is mounted through FUSE, so both say the same.
    "relatime",
    "nodiratime",
    "nolazytime",
    "norelatime",
    "nostrictatime",
    "default_permissions",
    "noautodefrag",
    "barrier",
    "acl",
    "space_cache=v2",
    "nossd",
    "ssd",
    "enospc_debug",
    "noenospc_debug",
    "nomand",
];

/// What the table of mounts says of every mount over FUSE, and mount repeats when it remounts.
const REPEATED: [&str; 2] = ["user_id", "group_id"];

/// What the kernel's btrfs does and this program does not.
const UNSUPPORTED: [&str; 22] = [
    // Of other filesystems over FUSE. The kernel would send whole pages, which files do not take that are only appended to.
    "writeback",
    "sync",
    "dirsync",
    "strictatime",
    "lazytime",
    "diratime",
    "mand",
    "nobarrier",
    "autodefrag",
    "metadata_ratio",
    "thread_pool",
    "fatal_errors",
    "rescue",
    "clear_cache",
    "space_cache",
    "skip_balance",
    "noacl",
    "user_subvol_rm_allowed",
    "norecovery",
    "nologreplay",
    "usebackuproot",
    "ssd_spread",
];

impl Wanted {
    /// What these options say, one each. With `sloppy`, those that are not known are let be.
    pub(crate) fn parse(options: &[String], sloppy: bool) -> Result<Self> {
        let mut wanted = Self::default();
        for option in options.iter().filter(|option| !option.is_empty()) {
            wanted.add(option, sloppy)?;
        }
        Ok(wanted)
    }

    /// What is compressed has checksums, and is never overwritten in place: the last of such options counts, as for the kernel.
    fn compress(&mut self, compress: Option<Compress>) {
        self.compress = compress;
        if compress.is_some() {
            self.new_files = NewFiles::Copied;
        }
    }

    fn add(&mut self, option: &str, sloppy: bool) -> Result {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        match (name, value) {
            ("ro", None) => self.read_only = true,
            ("rw", None) => self.read_only = false,
            ("suid", None) => self.suid = true,
            ("nosuid", None) => self.suid = false,
            ("dev", None) => self.dev = true,
            ("nodev", None) => self.dev = false,
            ("exec", None) => self.exec = true,
            ("noexec", None) => self.exec = false,
            ("allow_other", None) => self.allow_other = true,
            ("io_uring", None) => self.transport = Transport::IoUring,
            ("noio_uring", None) => self.transport = Transport::Device,
            ("degraded", None) => self.degraded = true,
            ("nosandbox", None) => self.sandbox = false,
            ("remount", None) => self.remount = true,
            ("uid", Some(value)) => self.owner.uid = Some(number(option, value)?),
            ("gid", Some(value)) => self.owner.gid = Some(number(option, value)?),
            ("treelog", None) => self.tree_log = true,
            ("notreelog", None) => self.tree_log = false,
            // What is freed may be written again before it is discarded, so neither is another's business.
            ("discard", None | Some("sync" | "async")) => self.discard = true,
            ("nodiscard", None) => self.discard = false,
            ("flushoncommit", None) => self.flush_on_commit = true,
            ("noflushoncommit", None) => self.flush_on_commit = false,
            ("subvolid", Some(value)) => {
                // The top level has two names.
                let id = match number::<u64>(option, value)? {
                    0 => 5,
                    id => id,
                };
                self.subvolume = Some(id.to_string().into());
            }
            // A path that is a number would be an id.
            ("subvol", Some(value)) => {
                self.subvolume = Some(format!("/{}", value.trim_start_matches('/')).into());
            }
            ("device", Some(value)) => self.devices.push(value.into()),
            ("commit", Some(value)) => {
                let secs = number(option, value)?;
                self.commit = (secs > 0).then(|| Duration::from_secs(secs));
            }
            ("compress" | "compression", value) => self.compress(compress(option, value, false)?),
            ("compress-force", value) => self.compress(compress(option, value, true)?),
            ("nodatacow", None) => {
                self.new_files = NewFiles::InPlace;
                self.compress = None;
            }
            ("nodatasum", None) if self.new_files == NewFiles::Copied => {
                self.new_files = NewFiles::WithoutChecksums;
            }
            // The one goes with the other, and stays when that is taken back.
            ("datacow", None) if self.new_files == NewFiles::InPlace => {
                self.new_files = NewFiles::WithoutChecksums;
            }
            ("nodatasum" | "datacow", None) => {}
            ("datasum", None) => self.new_files = NewFiles::Copied,
            ("max_inline", Some(value)) => self.max_inline = Some(size(option, value)?),
            _ if name.starts_with("x-") || name.starts_with("X-") || name == "comment" => {}
            _ if LET_BE.contains(&option) || REPEATED.contains(&name) => {}
            _ if UNSUPPORTED.contains(&name) || UNSUPPORTED.contains(&option) => {
                return Err(Error::Unsupported(format!("the mount option {option}")).into());
            }
            _ if sloppy => {}
            _ => return Err(Failure::Usage(format!("the mount option {option} is not known"))),
        }
        Ok(())
    }
}

/// A size in bytes, which may end with a unit.
fn size(option: &str, value: &str) -> Result<u64> {
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &value[digits.len()..] {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        _ => return number(option, value),
    };
    Ok(number::<u64>(option, digits)?.saturating_mul(1 << shift))
}

fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| Failure::Usage(format!("{option} does not say a number")))
}

fn compress(option: &str, value: Option<&str>, forced: bool) -> Result<Option<Compress>> {
    if matches!(value, Some("no" | "none")) {
        return Ok(None);
    }
    let method = value.unwrap_or("zlib").parse();
    method
        .map(|method| Some(Compress { method, forced }))
        .map_err(|reason| Failure::Usage(format!("{option}: {reason}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Result<Wanted> {
        let options: Vec<_> = options.split(',').map(str::to_owned).collect();
        Wanted::parse(&options, false)
    }

    #[test]
    fn what_is_asked_for_is_wanted() {
        assert_eq!(parse("").ok(), Some(Wanted::default()));
        let wanted = parse(
            "ro,rw,noatime,x-systemd.automount,subvol=2024,uid=7,commit=5,compress-force=zstd:3,noexec,dev",
        );
        let wanted = wanted.expect("all of them are known");
        assert_eq!(wanted.subvolume, Some("/2024".into()));
        assert_eq!(wanted.owner, Owner { uid: Some(7), gid: None });
        assert_eq!(wanted.commit, Some(Duration::from_secs(5)));
        assert!(wanted.compress.is_some_and(|compress| compress.forced));
        assert!(!wanted.read_only && !wanted.exec && wanted.dev && !wanted.suid);
        assert_eq!(parse("subvolid=0").ok().and_then(|w| w.subvolume), Some("5".into()));
        assert_eq!(parse("compress=zlib,compress=none").ok(), Some(Wanted::default()));
        assert_eq!(parse("notreelog").map(|wanted| wanted.tree_log).ok(), Some(false));
        assert_eq!(parse("notreelog,treelog").ok(), Some(Wanted::default()));
        assert_eq!(parse("user_id=0,group_id=0").ok(), Some(Wanted::default()));
        assert_eq!(parse("commit=0").ok(), Some(Wanted::default()));
        for option in ["discard", "discard=sync", "discard=async"] {
            assert_eq!(parse(option).map(|wanted| wanted.discard).ok(), Some(true), "{option}");
        }
        assert_eq!(parse("discard,nodiscard").ok(), Some(Wanted::default()));
        assert_eq!(parse("flushoncommit").map(|wanted| wanted.flush_on_commit).ok(), Some(true));
        assert_eq!(parse("flushoncommit,noflushoncommit").ok(), Some(Wanted::default()));
        let stored = |options| {
            let wanted = parse(options).expect("all of them are known");
            (wanted.new_files, wanted.compress.is_some())
        };
        assert_eq!(stored("compress=zstd,nodatacow"), (NewFiles::InPlace, false));
        assert_eq!(stored("nodatacow,nodatasum"), (NewFiles::InPlace, false));
        assert_eq!(stored("nodatacow,datacow"), (NewFiles::WithoutChecksums, false));
        assert_eq!(stored("nodatacow,datasum"), (NewFiles::Copied, false));
        assert_eq!(stored("nodatacow,compress=zstd"), (NewFiles::Copied, true));
        let inline = |options| parse(options).ok().and_then(|wanted| wanted.max_inline);
        assert_eq!(["max_inline=0", "max_inline=4k"].map(inline), [Some(0), Some(4096)]);
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for option in ["autodefrag", "strictatime", "writeback", "norecovery"] {
            let refused = parse(option).map_err(|failure| failure.to_string());
            assert_eq!(refused, Err(format!("not supported: the mount option {option}")));
        }
        for option in [
            "bogus",
            "uid=root",
            "subvol",
            "ro=1",
            "compress=gzip",
            "commit=soon",
            "uid",
            "max_inline=4x",
            "discard=later",
        ] {
            let refused = parse(option);
            assert!(matches!(refused, Err(Failure::Usage(_))), "{option}: {refused:?}");
        }
        assert!(Wanted::parse(&["bogus".to_owned()], true).is_ok());
        assert!(Wanted::parse(&["autodefrag".to_owned()], true).is_err());
    }
}
