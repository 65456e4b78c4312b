//! Leaves that the kernel does not read: ours reads none of them.
//!
//! A leaf that ours takes and the kernel does not is worse than a refusal: a write puts its items
//! into other leaves, or items of other files into it, and the kernel loses these.
//!
//! Each round patches every leaf that a mount can do without, has the kernel search for the first
//! key of each, and compares the answer with the strict check of `btrfs-format`: what the kernel
//! refuses is refused, and what it reads is refused only where a reader has no use for it either.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use offshoot_btrfs_format::check::{Geometry, verify};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_or};

use crate::MutantMembers;
use crate::damage::header;
use crate::image::Patched;
use crate::judge::CheckJudge;
use crate::mutation::from_env;
use crate::volumes::{LAYOUTS, MutantLayout, SoundVolume};

/// How often each leaf is patched in an ordinary run.
const ROUNDS: u64 = 6;
const SEED: u64 = 0x7265_6675;

/// `BTRFS_IOC_TREE_SEARCH` of one key for each line, which is answered by the error number.
const SEARCH: &str = r#"
    open(my $dir, "<", $ARGV[0]) or die "$ARGV[0]: $!";
    while (<STDIN>) {
        my ($tree, $id, $type, $offset) = map { $_ + 0 } split;
        my $key = pack("Q7L4Q4", $tree, $id, $id, $offset, $offset, 0, ~0, $type, $type, 1, (0) x 5);
        my $args = $key . "\0" x (4096 - length $key);
        print ioctl($dir, 0xD0009411, $args) ? 0 : $! + 0, "\n";
    }"#;

/// Whether the kernel reads the leaf of each tree that has this key.
fn kernel_reads(mount: &Path, places: &[(TreeId, Key)]) -> Vec<bool> {
    let mut search = Command::new("perl")
        .args(["-e", SEARCH])
        .arg(mount)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("there is perl");
    let lines: Vec<String> = places
        .iter()
        .map(|(tree, key)| {
            format!("{} {} {} {}\n", tree.0, key.objectid, key.item_type.0, key.offset)
        })
        .collect();
    let lines = lines.concat();
    let mut input = search.stdin.take().expect("a pipe");
    std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(lines.as_bytes()).expect("perl reads"));
        let output = search.wait_with_output().expect("perl ends");
        assert!(output.status.success(), "the search failed");
        let text = String::from_utf8(output.stdout).expect("numbers");
        let errors: Vec<_> = text.lines().map(|line| line == "0").collect();
        assert_eq!(errors.len(), places.len(), "one answer for each key");
        errors
    })
}

/// A leaf that the kernel is asked for: the number of its block, its tree, its first key.
type AskedLeaf = (usize, TreeId, Key);

/// The leaves that a mount can do without.
fn leaves(sound: &SoundVolume) -> Vec<AskedLeaf> {
    let owner = |leaf: usize| TreeId(header(&sound.target.blocks[leaf].bytes).owner.get());
    // A search for block groups meets other leaves of the extent tree, where they are in that.
    let is_of_use = |tree| match tree {
        TreeId::CSUM | TreeId::UUID | TreeId::FREE_SPACE => true,
        TreeId::EXTENT => {
            sound.structures.leaves().any(|(leaf, _)| owner(leaf) == TreeId::BLOCK_GROUP)
        }
        _ => false,
    };
    let root_directory = Key::new(256, ItemType::INODE_ITEM, 0);
    let mut all = Vec::new();
    for (leaf, items) in sound.structures.leaves() {
        let Some(&(first, _)) = items.first() else { continue };
        let tree = owner(leaf);
        let is_left = if tree.is_subvolume() {
            tree != TreeId::FS || items.iter().all(|(key, _)| *key != root_directory)
        } else {
            // A mount reads the roots of these trees.
            is_of_use(tree) && sound.structures.has_pointer(leaf)
        };
        if is_left {
            all.push((leaf, tree, first));
        }
    }
    all
}

/// Which of these leaves the kernel reads, when it mounts the volume.
fn read_by_kernel(
    judge: &mut CheckJudge,
    members: &MutantMembers,
    leaves: &[AskedLeaf],
) -> Result<Vec<bool>, String> {
    let places: Vec<_> = leaves.iter().map(|&(_, tree, key)| (tree, key)).collect();
    judge.look_at_kernels(members, |mount| kernel_reads(mount, &places))
}

/// Patches all leaves so many times, and tells which ones only the kernel refuses.
fn compare(mut sound: SoundVolume, seed: u64, rounds: u64) -> Vec<String> {
    let fresh = |images: &[Arc<_>]| -> MutantMembers {
        let over = |image| Arc::new(MemoryDevice::over(Arc::new(Patched::new(image))));
        images.iter().map(over).collect()
    };
    let mut superblock = vec![0; SUPERBLOCK_SIZE];
    let at = SUPERBLOCK_OFFSETS[0];
    sound.target.sound()[0].read_at(at, &mut superblock).expect("a superblock");
    let superblock = Superblock::parse(&superblock, at).expect("a sound one");
    let geometry = Geometry { is_strict: true, ..Geometry::of(&superblock) };
    let mut leaves = leaves(&sound);
    let is_read = read_by_kernel(&mut sound.judge, &fresh(&sound.images), &leaves);
    let mut is_read = is_read.expect("a sound volume mounts").into_iter();
    // The kernel searches nothing in a subvolume that is deleted.
    leaves.retain(|_| is_read.next() == Some(true));
    let (mut problems, mut count, mut refused) = (Vec::new(), 0, 0);
    for round in 0..rounds {
        let mut random = Random::new(seed ^ sound.number << 16 ^ round);
        let members = fresh(&sound.images);
        let mut patched = Vec::new();
        for &leaf in &leaves {
            let SoundVolume { structures, target, .. } = &sound;
            if let Some(patch) = structures.draw_in(target, &mut random, leaf.0) {
                patch.apply(target, &members);
                patched.push((leaf, patch));
            }
        }
        let asked: Vec<_> = patched.iter().map(|(leaf, _)| *leaf).collect();
        // The mount may have met one of these leaves.
        let Ok(are_read) = read_by_kernel(&mut sound.judge, &members, &asked) else { continue };
        for ((leaf, patch), is_read) in patched.iter().zip(are_read) {
            count += 1;
            refused += u64::from(!is_read);
            let (_, bytes) = patch.block().expect("a patch of a leaf");
            let mut bytes = bytes.clone();
            sound.target.fit_checksum(&mut bytes);
            let logical = Logical(header(&bytes).bytenr.get());
            let is_taken = verify(&bytes, &geometry, logical).is_ok();
            if is_read {
                let is_readable = verify(&bytes, &Geometry::of(&superblock), logical).is_ok();
                if is_readable && !is_taken {
                    problems.push(format!("{}, only ours: {}", sound.name, patch.what));
                }
                continue;
            }
            if !is_taken {
                continue;
            }
            // It may be another leaf that kept the kernel from this one.
            let alone = fresh(&sound.images);
            patch.apply(&sound.target, &alone);
            if read_by_kernel(&mut sound.judge, &alone, &[*leaf]) == Ok(vec![false]) {
                problems.push(format!("{}: {}", sound.name, patch.what));
            }
        }
    }
    println!("{}: {count} leaves, of which the kernel refuses {refused}", sound.name);
    assert!(refused > 0, "{}: the kernel refuses nothing", sound.name);
    problems
}

#[test]
fn leaves_that_the_kernel_refuses_are_refused() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_or(SEED);
    println!("OFFSHOOT_SEED={seed}");
    let rounds = from_env("OFFSHOOT_ROUNDS").unwrap_or(ROUNDS);
    let compared = |layout: &MutantLayout| compare(layout.carried(&judges), seed, rounds);
    // Another test has copies of the volume with several members at the same time, and tools tell
    // members of two volumes with one id not apart.
    let layouts = LAYOUTS.iter().filter(|layout| !layout.has_several_members());
    let problems: Vec<_> = layouts.flat_map(compared).collect();
    assert!(problems.is_empty(), "OFFSHOOT_SEED={seed}\n{}", problems.join("\n"));
}
