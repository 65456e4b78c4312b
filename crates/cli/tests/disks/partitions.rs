//! Partitions.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;

use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;

use super::{KernelImage, MIB, VOLUME_BYTES, copy_range, pipe};

const GPT: &str = "label: gpt\n\
    start=1MiB, size=16MiB, name=\"EFI system\", uuid=0FF50001-0000-4000-8000-0000000000A1\n\
    start=20MiB, size=128MiB, name=\"system\", uuid=0FF50001-0000-4000-8000-0000000000A2\n";

const MBR: &str = "label: dos\nlabel-id: 0x0ff50001\n\
    start=1MiB, size=16MiB, type=83\n\
    start=20MiB, size=200MiB, type=5\n\
    start=22MiB, size=8MiB, type=83\n\
    start=40MiB, size=128MiB, type=83\n";

fn ext4(bench: &KernelImage, name: &str, size: u64) {
    let path = bench.path(name);
    File::create(&path).and_then(|file| file.set_len(size)).expect("an image");
    run("mkfs.ext4", &["-q".as_ref(), path.as_os_str()]);
}

impl KernelImage {
    /// Requires that each of these names leads to a volume with the file `text`.
    #[track_caller]
    fn is_named(&self, volumes: &[&str]) {
        for volume in volumes {
            assert_eq!(self.does(&["cat", &format!("{volume}:/text")]), "what the kernel wrote\n");
        }
    }
}

#[test]
fn a_volume_is_found_and_named_in_every_way() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.partitioned("gpt.img", 160 * MIB, GPT);
    bench.put_volume("gpt.img", 20 * MIB);
    bench.partitioned("mbr.img", 240 * MIB, MBR);
    bench.put_volume("mbr.img", 40 * MIB);
    for volume in [
        "gpt.img",
        "gpt.img@2",
        "gpt.img@system",
        "gpt.img@root",
        "gpt.img@0ff50001-0000-4000-8000-0000000000a2",
        "mbr.img",
        "mbr.img@6",
        "mbr.img@root",
        "mbr.img@0FF50001-06",
    ] {
        bench.is_same(&[volume]);
        bench.is_named(&[volume]);
    }
    bench.is_same(&["--offset", "20M", "gpt.img"]);
    // A file whose whole name matches comes first.
    std::fs::rename(bench.path("raw.img"), bench.path("gpt.img@2")).expect("it is renamed");
    bench.is_same(&["gpt.img@2"]);
    // When the first header is lost, the program uses the copy, and says so.
    let file = File::options().write(true).open(bench.path("gpt.img")).expect("an image");
    file.write_all_at(&[0; 512], 512).expect("a write");
    let output = bench.offshoot(&["cat", "gpt.img:/text"]);
    assert_eq!(output.stdout, b"what the kernel wrote\n");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("its copy is used"), "{said}");
}

#[test]
fn info_lists_what_partitions_hold() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.partitioned("gpt.img", 160 * MIB, GPT);
    ext4(&bench, "ext4.img", 16 * MIB);
    copy_range(&bench.path("ext4.img"), 0, &bench.path("gpt.img"), MIB, 16 * MIB);
    let text = bench.does(&["info", "gpt.img"]);
    assert!(text.starts_with("layers             gpt\npartitions\n"), "{text}");
    assert!(text.contains("EFI system  holds ext2, ext3 or ext4\n"), "{text}");
    assert!(text.ends_with("system  holds nothing that is known\n"), "{text}");
    bench.put_volume("gpt.img", 20 * MIB);
    for volume in ["gpt.img", "gpt.img@2"] {
        let text = bench.does(&["info", volume]);
        assert!(text.starts_with("layers             gpt:2 > btrfs\npartitions\n"), "{text}");
        assert!(text.contains("system  holds btrfs, labelled root\nlabel "), "{text}");
    }
    let json = bench.does(&["info", "--json", "gpt.img"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["layers"], serde_json::json!(["gpt:2", "btrfs"]));
    assert_eq!(json["partitions"][0]["holds"], "ext2, ext3 or ext4");
    assert_eq!(json["partitions"][1]["start"], 20 * MIB);
    let text = bench.does(&["info", "--offset", "20M", "gpt.img"]);
    assert!(text.contains("layers             offset:20971520 > btrfs\n"), "{text}");
}

#[test]
fn errors_say_what_there_is_and_what_to_write() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    ext4(&bench, "ext4.img", 16 * MIB);
    let said = bench.fails(&["ls", "ext4.img"], 1);
    assert_eq!(said, "offshoot: ext4.img: ext2, ext3 or ext4, not btrfs or XFS\n");
    bench.partitioned("gpt.img", 320 * MIB, &format!("{GPT}start=160MiB, size=128MiB\n"));
    let said = bench.fails(&["ls", "gpt.img"], 1);
    assert!(
        said.contains("gpt.img: a disk with a GPT, and none of its partitions holds btrfs or XFS")
    );
    bench.put_volume("gpt.img", 20 * MIB);
    bench.put_volume("gpt.img", 160 * MIB);
    let said = bench.fails(&["ls", "gpt.img:/"], 2);
    assert!(said.contains("2 of its partitions hold btrfs or XFS\n"), "{said}");
    let line = "partition 2, 128 MiB, holds btrfs, labelled root: write gpt.img@2:/\n";
    assert!(said.contains(line), "{said}");
    let said = bench.fails(&["ls", "gpt.img@root:/"], 2);
    assert!(said.contains("2 partitions are called root\n"), "{said}");
    let said = bench.fails(&["info", "gpt.img@7"], 2);
    assert!(said.contains("no partition is called 7\n"), "{said}");
    assert!(said.contains(": write gpt.img@3\n"), "{said}");
    let said = bench.fails(&["ls", "gpt.img@1:/"], 1);
    assert!(said.contains("gpt.img@1: no btrfs superblock"), "{said}");
    let said = bench.fails(&["ls", "raw.img@1:/"], 2);
    assert!(said.contains("raw.img has no partition table"), "{said}");
    let said = bench.fails(&["ls", "--offset", "1G", "raw.img:/"], 1);
    assert!(said.contains("are no part of it"), "{said}");
    let said = bench.fails(&["mv", "gpt.img@2:/text", "gpt.img@3:/new"], 2);
    assert!(said.contains("mv works inside one volume"), "{said}");
    let said = bench.fails(&["mkfs", "gpt.img"], 1);
    assert!(said.contains("gpt.img holds a GUID partition table"), "{said}");
}

/// The table of a disk with sectors of 4 KiB counts in these sectors. An image file does not have a
/// sector size. A GPT shows it; with an MBR the contents of the partitions show it.
#[test]
fn tables_in_large_sectors() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    for (image, script, number, start) in
        [("gpt.img", GPT, 2, 20 * MIB), ("mbr.img", MBR, 6, 40 * MIB)]
    {
        let path = bench.path(image);
        File::create(&path).and_then(|file| file.set_len(240 * MIB)).expect("an image");
        let attached = AttachedImages::with_sectors(std::slice::from_ref(&path), 4096);
        let [device] = attached.devices()[..] else { panic!("one device") };
        let words = ["--quiet", "--no-reread", "--no-tell-kernel", device].map(OsStr::new);
        pipe("sfdisk", &words, script.as_bytes());
        let partition = format!("{device}@{number}");
        bench.does(&["mkfs", &partition, "-L", "made"]);
        bench.does(&["cp", "raw.img:/text", &format!("{device}@made:/text")]);
        bench.is_named(&[device, &partition]);
        drop(attached);
        bench.take_volume(image, start);
        bench.disks.assert_checks();
        let mount = bench.disks.mount("ro");
        let text = std::fs::read(mount.path().join("text")).expect("the kernel reads it");
        assert_eq!(text, b"what the kernel wrote\n");
    }
    bench.is_named(&["gpt.img", "gpt.img@2"]);
    for volume in ["mbr.img", "mbr.img@6", "mbr.img@made"] {
        let output = bench.offshoot(&["cat", &format!("{volume}:/text")]);
        assert_eq!(output.stdout, b"what the kernel wrote\n", "{output:?}");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(said.contains("mbr.img: its MBR seems to count in sectors of 4096"), "{said}");
    }
    let said = bench.fails(&["mkfs", "mbr.img@5"], 1);
    assert!(said.contains("seems to count in sectors of 4096 bytes"), "{said}");
    // The same bytes on a device with another sector size.
    let attached = AttachedImages::new(&[bench.path("gpt.img")]);
    bench.is_named(&[attached.devices()[0]]);
    drop(attached);
    // The first header of the GPT is lost.
    let file = File::options().write(true).open(bench.path("gpt.img")).expect("an image");
    file.write_all_at(&[0; 4096], 4096).expect("a write");
    let output = bench.offshoot(&["cat", "gpt.img:/text"]);
    assert_eq!(output.stdout, b"what the kernel wrote\n", "{output:?}");
}

/// An older layout left a superblock at eight times the offset of a partition. That does not prove
/// large sectors if the disk is too small for a table that counts in them.
#[test]
fn an_old_signature_makes_no_large_sectors() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let mut superblock = vec![0; 4096];
    let raw = File::open(bench.path("raw.img")).expect("an image");
    raw.read_exact_at(&mut superblock, 65536).expect("its superblock");
    let one = "label: dos\nstart=2MiB, size=16MiB, type=83\n";
    let two = format!("{one}start=100MiB, size=16MiB, type=83\n");
    // If the table counts in large sectors, the one partition is cut off, and the second one begins
    // behind the disk.
    for (size, script, proof) in [(100, one, false), (200, &two, false), (200, one, true)] {
        let path = bench.partitioned("mbr.img", size * MIB, script);
        let file = File::options().write(true).open(path).expect("an image");
        file.write_all_at(&superblock, 16 * MIB + 65536).expect("a write");
        // The old superblock leads to no volume, and the warning says why it was tried.
        let said = bench.fails(&["ls", "mbr.img:/"], if proof { 3 } else { 1 });
        assert_eq!(said.contains("none of its partitions holds btrfs"), !proof, "{said}");
        assert_eq!(said.contains("seems to count in sectors of 4096"), proof, "{said}");
    }
    // The image is damaged there: the compressed cluster consists of zeros.
    bench.qemu_img(&["convert", "-O", "qcow2", "mbr.img", "mbr.qcow2"]);
    let image = File::options().read(true).write(true).open(bench.path("mbr.qcow2"));
    let image = image.expect("an image");
    let number = |at| {
        let mut bytes = [0; 8];
        image.read_exact_at(&mut bytes, at).expect("a read");
        u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
    };
    let entry_at = number(number(40)) + (16 * MIB / 65536 + 1) * 8;
    assert_ne!(number(entry_at), 0, "the superblock is in a cluster");
    image.write_all_at(&(1_u64 << 62 | 512).to_be_bytes(), entry_at).expect("a write");
    let said = bench.fails(&["ls", "mbr.qcow2:/"], 1);
    assert!(said.contains("none of its partitions holds btrfs"), "{said}");
}

/// No operation inside a partition changes anything outside it.
#[test]
fn nothing_is_written_outside_of_a_partition() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let disk = bench.partitioned("gpt.img", 160 * MIB, GPT);
    bench.put_volume("gpt.img", 20 * MIB);
    let file = File::options().read(true).write(true).open(&disk).expect("an image");
    let pattern = |seed: u8| (0..MIB).map(|at| seed ^ at.to_le_bytes()[1]).collect::<Vec<u8>>();
    file.write_all_at(&pattern(1), 19 * MIB).expect("a write");
    file.write_all_at(&pattern(2), 148 * MIB).expect("a write");
    let outside = || {
        let mut front = vec![0; 20 << 20];
        let mut end = vec![0; 12 << 20];
        file.read_exact_at(&mut front, 0).expect("a read");
        file.read_exact_at(&mut end, 148 * MIB).expect("a read");
        (front, end)
    };
    let before = outside();
    std::fs::write(bench.path("new"), vec![b'x'; 3 << 20]).expect("a file");
    bench.does(&["mkdir", "gpt.img@2:/made"]);
    // Two names of one volume on a command line mean one volume.
    bench.does(&["cp", "new", "gpt.img@system:/made/copy"]);
    bench.does(&["cp", "gpt.img:/text", "gpt.img@2:/made/text"]);
    bench.does(&["rm", "-r", "gpt.img:/text"]);
    bench.does(&["trim", "gpt.img@root"]);
    bench.does(&["scrub", "gpt.img@2"]);
    assert!(outside() == before, "something outside of the partition changed");
    bench.take_volume("gpt.img", 20 * MIB);
    bench.disks.assert_checks();
    let mount = bench.disks.mount("ro");
    let read = |name: &str| std::fs::read(mount.path().join(name)).expect("the kernel reads it");
    assert!(read("made/copy") == vec![b'x'; 3 << 20]);
    assert_eq!(read("made/text"), b"what the kernel wrote\n");
    assert!(!mount.path().join("text").exists());
}

/// Two partitions of one disk are two volumes on a command line, or two members of one volume.
#[test]
fn partitions_of_one_disk_are_used_together() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let script = "label: gpt\nstart=1MiB, size=128MiB\nstart=129MiB, size=128MiB\n";
    bench.partitioned("two.img", 260 * MIB, script);
    bench.put_volume("two.img", MIB);
    bench.does(&["mkfs", "two.img@2", "-L", "second"]);
    bench.does(&["cp", "two.img@1:/text", "two.img@second:/there"]);
    bench.does(&["rm", "two.img@1:/text", "two.img@2:/there"]);
    bench.does(&["cp", "raw.img:/text", "two.img@2:/there"]);
    assert_eq!(bench.does(&["cat", "two.img@second:/there"]), "what the kernel wrote\n");

    bench.partitioned("pair.img", 260 * MIB, script);
    bench.does(&["mkfs", "pair.img@1", "pair.img@2", "-d", "raid1"]);
    std::fs::write(bench.path("text"), "to both\n").expect("a file");
    bench.does(&["cp", "--device", "pair.img@2", "text", "pair.img@1:/text"]);
    let disks = Disks::create(&judges, 2, VOLUME_BYTES / MIB);
    for (image, start) in disks.images().iter().zip([MIB, 129 * MIB]) {
        copy_range(&bench.path("pair.img"), start, image, 0, VOLUME_BYTES);
    }
    disks.assert_checks();
    let mount = disks.mount("ro");
    let text = std::fs::read(mount.path().join("text")).expect("the kernel reads it");
    assert_eq!(text, b"to both\n");
}

/// No two members may share bytes, and the program checks that before it writes.
#[test]
fn a_member_is_named_once() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let script =
        "label: dos\nstart=1MiB, size=128MiB, type=83\nstart=130MiB, size=128MiB, type=83\n";
    let path = bench.partitioned("two.img", 300 * MIB, script);
    // The second partition begins inside the first one. No tool would write that.
    bench.partitioned("over.img", 300 * MIB, script);
    let over = File::options().write(true).open(bench.path("over.img")).expect("an image");
    over.write_all_at(&(64u32 << 11).to_le_bytes(), 446 + 16 + 8).expect("a write");
    std::os::unix::fs::symlink(&path, bench.path("link")).expect("a link");
    let before = [&*path, &bench.path("over.img")].map(|path| std::fs::read(path).expect("a file"));
    for words in [
        &["mkfs", "two.img@1", "two.img@1"][..],
        &["mkfs", "two.img@1", "link@1", "-d", "raid1"],
        &["mkfs", "over.img@1", "over.img@2"],
        &["mkfs", "--size", "400M", "two.img", "link"],
        &["mkfs", "--size", "400M", "new.img", "./new.img"],
        &["mkfs", "--force", "two.img", "two.img@2"],
    ] {
        let said = bench.fails(words, 1);
        assert!(said.contains("have bytes in common"), "{words:?}: {said}");
    }
    let after = [&*path, &bench.path("over.img")].map(|path| std::fs::read(path).expect("a file"));
    assert!(before == after, "something was written");
    assert!(!bench.path("new.img").exists());
    bench.does(&["mkfs", "two.img@1", "two.img@2"]);
    for second in ["two.img@1", "link@1"] {
        let said = bench.fails(&["mkdir", "--device", second, "two.img@1:/dir"], 1);
        assert!(said.contains("have bytes in common"), "{said}");
    }
}

/// A partition that the end of the disk cuts off: the program tells its contents, and that it is
/// cut off.
#[test]
fn a_partition_that_is_cut_off_still_holds_what_it_holds() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let script = "label: dos\nstart=1MiB, size=16MiB, type=83\nstart=20MiB, size=128MiB, type=83\n";
    let path = bench.partitioned("mbr.img", 160 * MIB, script);
    ext4(&bench, "ext4.img", 16 * MIB);
    copy_range(&bench.path("ext4.img"), 0, &path, MIB, 16 * MIB);
    bench.put_volume("mbr.img", 20 * MIB);
    let cut = |bytes| File::options().write(true).open(&path).and_then(|file| file.set_len(bytes));
    // The disk ends in the middle of the volume, before the first superblock of the volume, or in
    // the ext4.
    for (end, cut_off, holds) in [
        (100 * MIB, &[false, true][..], "btrfs, labelled root, cut off by the end of the disk"),
        (20 * MIB + 65536, &[false, true], "nothing that is known, cut off by the end of the disk"),
        (9 * MIB, &[true], "ext2, ext3 or ext4, cut off by the end of the disk"),
    ] {
        cut(end).expect("it is cut off");
        let said = String::from_utf8(bench.offshoot(&["info", "mbr.img"]).stdout).expect("text");
        let json = bench.offshoot(&["info", "--json", "mbr.img"]).stdout;
        let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        let found = json["partitions"].as_array().expect("a list").iter();
        let found: Vec<_> = found.map(|one| one["cut_off"].as_bool()).collect();
        let expected: Vec<_> = cut_off.iter().copied().map(Some).collect();
        assert_eq!(found, expected, "{json}");
        // The last partition is the one that is cut off.
        let number = cut_off.len();
        let mut lines = said.lines().map(str::trim_start);
        let line = lines.find(|line| line.starts_with(&number.to_string()));
        assert!(line.is_some_and(|line| line.ends_with(&format!("holds {holds}"))), "{said}");
    }
}

#[test]
fn a_volume_is_made_in_a_partition_or_at_an_offset() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.partitioned("mbr.img", 240 * MIB, MBR);
    let said = bench.fails(&["mkfs", "mbr.img@6", "--size", "1G"], 2);
    assert!(said.contains("is a partition, which has the size that it has"), "{said}");
    bench.does(&["mkfs", "mbr.img@6", "-L", "made"]);
    bench.take_volume("mbr.img", 40 * MIB);
    bench.disks.assert_checks();
    bench.does(&["cp", "raw.img:/text", "mbr.img:/text"]);
    let said = bench.fails(&["mkfs", "mbr.img@made"], 1);
    assert!(said.contains("mbr.img@6 holds btrfs"), "{said}");
    let plain = bench.path("plain.img");
    File::create(plain).and_then(|file| file.set_len(VOLUME_BYTES + MIB)).expect("an image");
    bench.does(&["mkfs", "--offset", "1M", "plain.img"]);
    std::fs::write(bench.path("new"), "new\n").expect("a file");
    bench.does(&["cp", "--offset", "1M", "new", "plain.img:/new"]);
    bench.take_volume("plain.img", MIB);
    bench.disks.assert_checks();
    let mount = bench.disks.mount("ro");
    assert_eq!(std::fs::read(mount.path().join("new")).expect("it is there"), b"new\n");
}

/// What an older layout left on a disk is not written: a btrfs with only a copy of its superblock,
/// or one over the whole disk under a partition table.
#[test]
fn what_an_older_layout_left_is_not_taken_for_the_volume() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let copy = |image: &str| {
        let mut superblock = vec![0; 4096];
        let raw = File::open(bench.path("raw.img")).expect("an image");
        raw.read_exact_at(&mut superblock, 64 * MIB).expect("a copy of its superblock");
        let file = File::options().write(true).open(bench.path(image)).expect("an image");
        file.write_all_at(&superblock, 64 * MIB).expect("a write");
    };
    bench.partitioned("gpt.img", 160 * MIB, GPT);
    bench.put_volume("gpt.img", 20 * MIB);
    copy("gpt.img");
    bench.is_same(&["gpt.img"]);
    let said = bench.fails(&["mkfs", "--offset", "1M", "gpt.img"], 1);
    assert!(said.contains("it has a partition table"), "{said}");
    ext4(&bench, "ext4.img", 160 * MIB);
    copy("ext4.img");
    let said = bench.fails(&["mkdir", "ext4.img:/dir"], 1);
    assert!(said.contains("ext2, ext3 or ext4, not btrfs"), "{said}");
    // Its superblock is in the gap before the first partition.
    let mut superblock = vec![0; 4096];
    let raw = File::open(bench.path("raw.img")).expect("an image");
    raw.read_exact_at(&mut superblock, 65536).expect("its superblock");
    bench.partitioned("both.img", 160 * MIB, GPT);
    let both = File::options().write(true).open(bench.path("both.img")).expect("an image");
    both.write_all_at(&superblock, 65536).expect("a write");
    let said = bench.fails(&["mkdir", "both.img:/dir"], 1);
    assert!(said.contains("over the whole disk and a partition table too"), "{said}");
}
