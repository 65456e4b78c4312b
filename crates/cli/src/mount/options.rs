//! Options in the form of `mount -o`.
//!
//! | options | what happens to them |
//! |---|---|
//! | what the engine or the kernel does | they are followed |
//! | of mount alone (`noauto`, `_netdev`, `x-...`), or true in any case (`noatime`, `default_permissions`) | they are ignored ([`LET_BE`]) |
//! | wishes: without them the result is as correct, and at most slower or larger | they are accepted, with one warning ([`WISHES`]) |
//! | promises that this program does not keep: when data is stored, what a damaged volume shows, who may do what | they are refused by name, as not supported ([`REFUSED`]) |
//! | all others | wrong usage; ignored if mount asks for that |

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use nix::unistd::{Group, User};
use offshoot_fuse::{ShownOwner, Transport};
use offshoot_vfs::{Code, Error};

use crate::exit::{Result, VerbFailure};
use crate::verbs::btrfs::storing::Storing;

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct MountCommandOptions {
    pub(crate) is_read_only: bool,
    pub(crate) allows_suid: bool,
    pub(crate) allows_devices: bool,
    pub(crate) allows_exec: bool,
    pub(crate) allows_others: bool,
    /// The mount can be shown elsewhere with mapped ids.
    pub(crate) allows_idmap: bool,
    /// The mount is one of a block device.
    pub(crate) is_fuseblk: bool,
    pub(crate) is_degraded: bool,
    /// Read the volume as the last commit left it.
    pub(crate) ignores_log: bool,
    pub(crate) is_remount: bool,
    /// A missing volume is not an error: it is just not mounted.
    pub(crate) may_be_missing: bool,
    /// Give up all rights that the process does not need while it serves.
    pub(crate) has_sandbox: bool,
    pub(crate) owner: ShownOwner,
    pub(crate) transport: Transport,
    pub(crate) subvolume: Option<OsString>,
    /// The id of the subvolume. If a path is given too, both must name the same subvolume.
    pub(crate) subvolume_id: Option<u64>,
    pub(crate) storing: Storing,
    pub(crate) commit: Option<Duration>,
    /// Whether fsync writes the tree log instead of committing.
    pub(crate) has_tree_log: bool,
    pub(crate) is_discarding: bool,
    pub(crate) flushes_on_commit: bool,
    pub(crate) devices: Vec<PathBuf>,
    /// Options that are accepted and not followed.
    pub(crate) wishes: Vec<String>,
}

impl Default for MountCommandOptions {
    fn default() -> Self {
        Self {
            is_read_only: false,
            allows_suid: false,
            allows_devices: false,
            allows_exec: true,
            allows_others: false,
            allows_idmap: false,
            is_fuseblk: false,
            is_degraded: false,
            ignores_log: false,
            is_remount: false,
            may_be_missing: false,
            has_sandbox: true,
            owner: ShownOwner::default(),
            transport: Transport::default(),
            subvolume: None,
            subvolume_id: None,
            storing: Storing::default(),
            commit: None,
            has_tree_log: true,
            is_discarding: false,
            flushes_on_commit: false,
            devices: Vec::new(),
            wishes: Vec::new(),
        }
    }
}

/// Options that mean nothing to this program, or that are true in any case.
const LET_BE: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "_netdev",
    "silent",
    "loud",
    "async",
    "noatime",
    // The kernel keeps no access times for FUSE, so both options mean the same.
    "relatime",
    "nodiratime",
    "nolazytime",
    "norelatime",
    "nostrictatime",
    "noiversion",
    "nomand",
    "symfollow",
    "default_permissions",
    "nonempty",
    // An image is mounted without a loop device.
    "loop",
    "noautodefrag",
    "nouser_subvol_rm_allowed",
    "barrier",
    "acl",
    "space_cache=v2",
    "ssd",
    "nossd",
    "nossd_spread",
    "enospc_debug",
    "noenospc_debug",
    "noinode_cache",
    "fatal_errors=bug",
];

/// Options with a value that mount adds itself.
const REPEATED: &[&str] = &[
    // Every FUSE mount has these in the table of mounts, and mount repeats them in a remount.
    "user_id", "group_id", "max_read", "blksize",
    // The user who mounted it, and the program that unmounts it.
    "user", "helper", "uhelper",
];

/// Wishes of btrfs(5) and mount(8). They change speed and what is stored besides files, but no
/// contents.
const WISHES: &[&str] = &[
    "autodefrag",
    "lazytime",
    "atime",
    "diratime",
    "strictatime",
    "iversion",
    // The kernel has no mandatory locks any more.
    "mand",
    "user_xattr",
    "thread_pool",
    "metadata_ratio",
    "skip_balance",
    "clear_cache",
    "space_cache",
    "nospace_cache",
    "inode_cache",
    "rescan_uuid_tree",
    "ssd_spread",
    // This program always uses barriers.
    "nobarrier",
    // If a user may not delete subvolumes, they just stay.
    "user_subvol_rm_allowed",
    // The kernel ignores these options and still accepts them.
    "alloc_start",
    "subvolrootid",
];

/// Options that the kernel follows and this program does not. A user who sets one relies on it.
const REFUSED: &[&str] = &[
    // From other FUSE filesystems. With it the kernel would send whole pages, which append-only
    // files refuse.
    "writeback",
    "allow_root",
    "auto_unmount",
    "sync",
    "dirsync",
    "nosymfollow",
    "noacl",
    "nouser_xattr",
    "context",
    "fscontext",
    "defcontext",
    "rootcontext",
    "offset",
    "sizelimit",
    "fatal_errors",
    "rescue",
    "usebackuproot",
    "recovery",
    "check_int",
    "check_int_data",
    "check_int_print_mask",
    "ref_verify",
    "ref_tracker",
    "fragment",
];

impl MountCommandOptions {
    /// Parses `options`, one option in each. With `is_sloppy`, unknown options are ignored.
    pub(crate) fn parse(options: &[String], is_sloppy: bool) -> Result<Self> {
        let mut wanted = Self::default();
        for option in options.iter().filter(|option| !option.is_empty()) {
            wanted.add(option, is_sloppy)?;
        }
        Ok(wanted)
    }

    /// The options in `options` that contradict these. `ro`, `suid`, `dev` and `exec` do not count,
    /// because a remount can change them.
    pub(crate) fn others(mut self, options: &[String], is_sloppy: bool) -> Result<Vec<&str>> {
        let mut others = Vec::new();
        for option in options.iter().filter(|option| !option.is_empty()) {
            let before = self.fixed();
            self.add(option, is_sloppy)?;
            if self.fixed() != before {
                others.push(option.as_str());
            }
        }
        Ok(others)
    }

    /// The error if `subvol=` names the subvolume `found`, but `subvolid=` names another one.
    pub(crate) fn other_subvolume(&self, found: u64) -> VerbFailure {
        let path =
            self.subvolume.as_ref().map_or_else(String::new, |path| path.display().to_string());
        let id = self.subvolume_id.unwrap_or_default();
        VerbFailure::Usage(format!(
            "subvol={path} has the number {found}, and subvolid={id} another"
        ))
    }

    /// These options without those that a remount can change.
    fn fixed(&self) -> Self {
        let free = Self::default();
        Self {
            is_read_only: free.is_read_only,
            allows_suid: free.allows_suid,
            allows_devices: free.allows_devices,
            allows_exec: free.allows_exec,
            is_remount: free.is_remount,
            may_be_missing: free.may_be_missing,
            wishes: free.wishes,
            ..self.clone()
        }
    }

    fn add(&mut self, option: &str, is_sloppy: bool) -> Result {
        let (name, value) = name_and_value(option);
        match (name, value) {
            ("ro", None) => self.is_read_only = true,
            ("rw", None) => self.is_read_only = false,
            ("suid", None) => self.allows_suid = true,
            ("nosuid", None) => self.allows_suid = false,
            ("dev", None) => self.allows_devices = true,
            ("nodev", None) => self.allows_devices = false,
            ("exec", None) => self.allows_exec = true,
            ("noexec", None) => self.allows_exec = false,
            ("allow_other", None) => self.allows_others = true,
            ("idmap", None) => self.allows_idmap = true,
            ("noidmap", None) => self.allows_idmap = false,
            ("io_uring", None) => self.transport = Transport::IoUring,
            ("noio_uring", None) => self.transport = Transport::Device,
            ("fuseblk", None) => self.is_fuseblk = true,
            ("nofuseblk", None) => self.is_fuseblk = false,
            ("degraded", None) => self.is_degraded = true,
            ("nosandbox", None) => self.has_sandbox = false,
            ("remount", None) => self.is_remount = true,
            ("uid", Some(value)) => self.owner.uid = Some(user(option, value)?),
            ("gid", Some(value)) => self.owner.gid = Some(group(option, value)?),
            ("nofail", None) => self.may_be_missing = true,
            ("fail", None) => self.may_be_missing = false,
            // Without the log replay the volume is not written either, as for the kernel.
            ("norecovery" | "nologreplay", None) | ("rescue", Some("nologreplay")) => {
                self.ignores_log = true;
            }
            ("treelog", None) => self.has_tree_log = true,
            ("notreelog", None) => self.has_tree_log = false,
            // Both modes are the same here: freed space may be reused before it is discarded.
            ("discard", None | Some("sync" | "async")) => self.is_discarding = true,
            ("nodiscard", None) => self.is_discarding = false,
            ("flushoncommit", None) => self.flushes_on_commit = true,
            ("noflushoncommit", None) => self.flushes_on_commit = false,
            ("subvolid", Some(value)) => {
                // The top level has two ids, 0 and 5.
                let id = match number::<u64>(option, value)? {
                    0 => 5,
                    id => id,
                };
                self.subvolume_id = Some(id);
            }
            // Without the slash, a path that is a number would be taken for an id.
            ("subvol", Some(value)) => {
                self.subvolume = Some(format!("/{}", value.trim_start_matches('/')).into());
            }
            ("device", Some(value)) => {
                let device = PathBuf::from(value);
                if !self.devices.contains(&device) {
                    self.devices.push(device);
                }
            }
            ("commit", Some(value)) => {
                let secs = number(option, value)?;
                self.commit = (secs > 0).then(|| Duration::from_secs(secs));
            }
            _ if self.storing.add(option)? => {}
            _ if name.starts_with("x-") || name.starts_with("X-") || name == "comment" => {}
            // The kernel handles security labels, and adds this option to the table of mounts.
            ("seclabel", None) => {}
            _ if LET_BE.contains(&option) => {}
            (name, Some(_)) if REPEATED.contains(&name) => {}
            (name, _) if WISHES.contains(&name) => self.wishes.push(option.to_owned()),
            (name, _) if REFUSED.contains(&name) => {
                return Err(Error::unsupported(
                    Code::Unsupported,
                    format!("the mount option {option}"),
                )
                .into());
            }
            _ if is_sloppy => {}
            _ => return Err(VerbFailure::Usage(format!("the mount option {option} is not known"))),
        }
        Ok(())
    }
}

/// Parses a user, given by number or name.
fn user(option: &str, value: &str) -> Result<u32> {
    if let Ok(uid) = value.parse() {
        return Ok(uid);
    }
    match User::from_name(value) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(VerbFailure::Usage(format!("{option}: there is no such user"))),
        Err(errno) => Err(VerbFailure::Host(option.to_owned(), errno.into())),
    }
}

/// Parses a group, given by number or name.
fn group(option: &str, value: &str) -> Result<u32> {
    if let Ok(gid) = value.parse() {
        return Ok(gid);
    }
    match Group::from_name(value) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(VerbFailure::Usage(format!("{option}: there is no such group"))),
        Err(errno) => Err(VerbFailure::Host(option.to_owned(), errno.into())),
    }
}

/// The name of an option, and its value if it has one.
pub(crate) fn name_and_value(option: &str) -> (&str, Option<&str>) {
    option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)))
}

/// The value of an option that says a number.
pub(crate) fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| VerbFailure::Usage(format!("{option} does not say a number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Result<MountCommandOptions> {
        let options: Vec<_> = options.split(',').map(str::to_owned).collect();
        MountCommandOptions::parse(&options, false)
    }

    #[test]
    fn what_is_asked_for_is_wanted() {
        assert_eq!(parse("").ok(), Some(MountCommandOptions::default()));
        let wanted = parse(
            "ro,rw,noatime,x-systemd.automount,subvol=2024,uid=7,commit=5,compress-force=zstd:3,noexec,dev",
        );
        let wanted = wanted.expect("all of them are known");
        assert_eq!(wanted.subvolume, Some("/2024".into()));
        assert_eq!(wanted.owner, ShownOwner { uid: Some(7), gid: None });
        assert_eq!(wanted.commit, Some(Duration::from_secs(5)));
        assert!(wanted.storing.compress.is_some_and(|compress| compress.is_forced));
        assert!(
            !wanted.is_read_only
                && !wanted.allows_exec
                && wanted.allows_devices
                && !wanted.allows_suid
        );
        assert_eq!(parse("subvolid=0").ok().and_then(|w| w.subvolume_id), Some(5));
        let root = ShownOwner { uid: Some(0), gid: Some(0) };
        assert_eq!(parse("uid=root,gid=root").map(|wanted| wanted.owner).ok(), Some(root));
        for option in ["norecovery", "nologreplay", "rescue=nologreplay"] {
            assert_eq!(parse(option).map(|wanted| wanted.ignores_log).ok(), Some(true), "{option}");
        }
        assert_eq!(parse("compress=zlib,compress=none").ok(), Some(MountCommandOptions::default()));
        assert_eq!(parse("notreelog").map(|wanted| wanted.has_tree_log).ok(), Some(false));
        assert_eq!(parse("notreelog,treelog").ok(), Some(MountCommandOptions::default()));
        assert_eq!(parse("user_id=0,group_id=0").ok(), Some(MountCommandOptions::default()));
        assert_eq!(parse("commit=0").ok(), Some(MountCommandOptions::default()));
        for option in ["discard", "discard=sync", "discard=async"] {
            assert_eq!(
                parse(option).map(|wanted| wanted.is_discarding).ok(),
                Some(true),
                "{option}"
            );
        }
        assert_eq!(parse("discard,nodiscard").ok(), Some(MountCommandOptions::default()));
        assert_eq!(parse("flushoncommit").map(|wanted| wanted.flushes_on_commit).ok(), Some(true));
        assert_eq!(
            parse("flushoncommit,noflushoncommit").ok(),
            Some(MountCommandOptions::default())
        );
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for option in ["sync", "noacl", "writeback", "rescue=all", "context=x"] {
            let refused = parse(option).map_err(|failure| failure.to_string());
            assert_eq!(refused, Err(format!("not supported: the mount option {option}")));
        }
        for option in [
            "bogus",
            "uid=no such user",
            "gid=no such group",
            "subvol",
            "ro=1",
            "compress=gzip",
            "commit=soon",
            "uid",
            "max_inline=4x",
            "discard=later",
        ] {
            let refused = parse(option);
            assert!(matches!(refused, Err(VerbFailure::Usage(_))), "{option}: {refused:?}");
        }
        assert!(MountCommandOptions::parse(&["bogus".to_owned()], true).is_ok());
        assert!(MountCommandOptions::parse(&["sync".to_owned()], true).is_err());
    }

    #[test]
    fn wishes_are_accepted_and_told() {
        let wanted = parse("autodefrag,thread_pool=4,rw,space_cache,space_cache=v2,skip_balance");
        let wishes = wanted.map(|wanted| wanted.wishes).unwrap_or_default();
        assert_eq!(wishes, ["autodefrag", "thread_pool=4", "space_cache", "skip_balance"]);
        let lists = [LET_BE, REPEATED, WISHES, REFUSED].concat();
        let mut once = lists.clone();
        once.sort_unstable();
        once.dedup();
        // `user` is in two lists: alone, and with a value.
        assert_eq!(once.len() + 1, lists.len(), "an option is in two lists");
    }

    #[test]
    fn what_is_in_force_can_be_repeated() {
        let list = |options: &str| options.split(',').map(str::to_owned).collect::<Vec<_>>();
        let others = |in_force: &str, options: &str| {
            let options = list(options);
            let in_force =
                MountCommandOptions::parse(&list(in_force), false).expect("they are known");
            let others = in_force.others(&options, false).expect("they are known");
            others.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let in_force = "subvol=/@,compress=zstd:1,uid=7,device=/dev/x";
        let repeated = "remount,ro,nodev,subvol=@,compress=zstd:1,device=/dev/x,lazytime";
        assert_eq!(others(in_force, repeated), [""; 0]);
        let changed = "remount,compress=lzo,commit=5,uid=7";
        assert_eq!(others(in_force, changed), ["compress=lzo", "commit=5"]);
    }
}
