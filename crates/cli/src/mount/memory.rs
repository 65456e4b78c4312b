//! How much of the memory of the host a mount takes for what is changed and not on the devices yet.
//!
//! Names go to leaves all over a directory, and a leaf that is changed again before a commit costs
//! nothing more. So a large directory is made twice as fast where all of its leaves may be changed
//! at a time, and a mount takes what it can spare for that.

use std::fs::read_to_string;
use std::path::Path;

use rustix::system::sysinfo;

/// The least and the most that it takes.
const LEAST: u64 = 64 << 20;
const MOST: u64 = 256 << 20;

/// What the process may use of memory is this many times as much.
const PARTS: u64 = 32;

/// What may be changed and not on the devices yet ([`offshoot_btrfs::OpenOptions::dirty_bytes`]).
pub(super) fn dirty_bytes() -> u64 {
    let host = sysinfo();
    let host = host.totalram.saturating_mul(host.mem_unit.into());
    let group = read_to_string("/proc/self/cgroup").unwrap_or_default();
    part_of(limits(Path::new("/sys/fs/cgroup"), &group).fold(host, u64::min))
}

fn part_of(memory: u64) -> u64 {
    (memory / PARTS).clamp(LEAST, MOST)
}

/// The limits of the control group that `group` names, as `/proc/self/cgroup` does, and of those
/// above it. What cannot be read limits nothing: there may be none, or an older hierarchy.
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
