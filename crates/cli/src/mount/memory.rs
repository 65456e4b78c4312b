//! How much memory of the host a mount uses for changes that are not on the devices yet.
//!
//! Names are hashed, so new files change leaves all over a directory. A leaf that is changed again
//! before a commit costs nothing more. So making a large directory is twice as fast if all of its
//! leaves can stay changed in memory, and a mount uses as much memory as the host can spare for
//! that.

use std::fs::read_to_string;
use std::path::Path;

use rustix::system::sysinfo;

/// The least and the most memory for changes, in bytes.
const LEAST: u64 = 64 << 20;
const MOST: u64 = 256 << 20;

/// The share of the available memory: one part in this many.
const PARTS: u64 = 32;

/// How many bytes may be changed and not on the devices yet
/// ([`offshoot_btrfs::EngineOptions::dirty_bytes`]).
pub(super) fn dirty_bytes() -> u64 {
    let host = sysinfo();
    let host = host.totalram.saturating_mul(host.mem_unit.into());
    let group = read_to_string("/proc/self/cgroup").unwrap_or_default();
    part_of(limits(Path::new("/sys/fs/cgroup"), &group).fold(host, u64::min))
}

fn part_of(memory: u64) -> u64 {
    (memory / PARTS).clamp(LEAST, MOST)
}

/// The memory limits of the control group in `group`, which has the form of `/proc/self/cgroup`,
/// and of the groups above it. A limit that cannot be read counts as none: there may be no limit,
/// or an older hierarchy.
fn limits(root: &Path, group: &str) -> impl Iterator<Item = u64> {
    let path = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    let paths = Path::new(path).ancestors().map(|path| root.join(path).join("memory.max"));
    paths.filter_map(|path| read_to_string(path).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let below = root.path().join("a/b");
        std::fs::create_dir_all(&below).expect("directories");
        std::fs::write(root.path().join("a/memory.max"), "4294967296\n").expect("a file");
        std::fs::write(below.join("memory.max"), "max\n").expect("a file");
        let of = |group| limits(root.path(), group).collect::<Vec<u64>>();
        assert_eq!(of("3:cpu:/x\n0::/a/b\n"), [4 << 30]);
        assert!(of("0::/\n").is_empty() && of("7:memory:/a\n").is_empty());
        std::fs::write(root.path().join("memory.max"), "1073741824").expect("a file");
        assert_eq!(of("0::/a/b\n").into_iter().min(), Some(1 << 30));
    }

    #[test]
    fn a_mount_takes_little_of_the_memory() {
        assert_eq!(part_of(512 << 20), LEAST);
        assert_eq!(part_of(4 << 30), 128 << 20);
        assert_eq!(part_of(1 << 40), MOST);
        assert!((LEAST..=MOST).contains(&dirty_bytes()));
    }
}
