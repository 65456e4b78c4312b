//! A disk as clouds provide it: a GPT with an EFI system partition and a btrfs with the subvolumes
//! `@` and `@home`, compressed, in a qcow2 with a backing file.

use std::ffi::OsStr;
use std::path::Path;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::run;

use super::{KernelImage, MIB, copy_range};

const TABLE: &str = "label: gpt\n\
    start=1MiB, size=4MiB, type=U, name=\"EFI System Partition\"\n\
    start=8MiB, size=256MiB, name=\"root\"\n";
const ESP: u64 = MIB;
const ESP_BYTES: u64 = 4 * MIB;
const ROOT: u64 = 8 * MIB;
const ROOT_BYTES: u64 = 256 * MIB;

/// The kernel makes two subvolumes with one of everything, and some files of a system.
fn fill_root(disks: &Disks) {
    disks.mkfs_and_settle(&["-L", "cloud"]);
    let mount = disks.mount("rw,noatime,compress=zstd:3");
    for name in ["@", "@home"] {
        let path = mount.path().join(name);
        run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path.as_os_str()]);
    }
    let root = mount.path().join("@");
    fill::handful::fill(&root);
    let etc = fill::directory(&root, "etc");
    fill::write(&etc.join("hostname"), b"cloud\n");
    fill::write(&etc.join("machine-id"), b"uninitialized\n");
    let log = "a line of a log that compresses well\n".repeat(60_000);
    fill::write(&fill::directory(&root, "log").join("old"), log.as_bytes());
    let user = fill::directory(&mount.path().join("@home"), "user");
    fill::write(&user.join("profile"), b"umask 022\n");
    run("btrfs", &["subvolume".as_ref(), "set-default".as_ref(), root.as_os_str()]);
}

/// Edits an image on the kernel's mount, as an administrator does before its first boot.
fn edit_by_the_kernel(bench: &KernelImage, mount: &Path) {
    let script = r#"
        set -e
        cp -p hostname "$1/@/etc/hostname"
        rm "$1/@/etc/machine-id"
        rm -r "$1/@/log" "$1/@/links"
        mkdir -m 700 "$1/@home/user/.ssh"
        cp -rp tree "$1/@home/user/tree"
        mv "$1/@home/user/profile" "$1/@home/user/.profile"
        chmod 600 "$1/@home/user/.profile"
        chown -h 1000:1000 "$1/@home/user/.profile"
        cp -dp mtab "$1/@/etc/mtab"
        btrfs -q subvolume snapshot "$1/@" "$1/@first"
    "#;
    let words = ["-c".as_ref(), OsStr::new(script), "sh".as_ref(), mount.as_os_str()];
    let mut command = std::process::Command::new("sh");
    let status = command.args(words).current_dir(&bench.dir).status().expect("a shell runs");
    assert!(status.success(), "the kernel's side: {status}");
}

/// Makes the same edits in the image with the program.
fn edit_by_us(bench: &KernelImage, image: &str) {
    let at = |path: &str| format!("{image}:{path}");
    let home = ["--subvolume", "@home", "--backing"];
    let top = ["--subvolume", "5", "--backing"];
    let root = ["--backing"];
    let edit = |verb: &[&str], tree: &[&str], rest: &[&str]| {
        bench.does(&[verb, tree, rest].concat());
    };
    edit(&["cp", "-p"], &root, &["hostname", &at("/etc/hostname")]);
    edit(&["rm"], &root, &[&at("/etc/machine-id")]);
    edit(&["rm", "-r"], &root, &[&at("/log"), &at("/links")]);
    edit(&["mkdir", "-m", "700"], &home, &[&at("/user/.ssh")]);
    edit(&["cp", "-rp"], &home, &["tree", &at("/user/tree")]);
    edit(&["mv"], &home, &[&at("/user/profile"), &at("/user/.profile")]);
    edit(&["chmod", "600"], &home, &[&at("/user/.profile")]);
    edit(&["chown", "1000:1000"], &home, &[&at("/user/.profile")]);
    edit(&["cp", "-dp"], &root, &["mtab", &at("/etc/mtab")]);
    edit(&["subvolume", "snapshot"], &top, &[&at("/@"), &at("/@first")]);
}

#[test]
fn a_cloud_image_is_edited_before_its_first_boot() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    let root = Disks::create(&judges, 1, ROOT_BYTES / MIB);
    fill_root(&root);

    let disk = bench.partitioned("disk.img", ROOT + ROOT_BYTES + MIB, TABLE);
    let efi = bench.path("efi");
    std::fs::create_dir_all(efi.join("EFI/BOOT")).expect("a directory");
    std::fs::write(efi.join("EFI/BOOT/BOOTX64.EFI"), vec![0x4d; 70_000]).expect("a file");
    // QEMU can present a directory as a floppy disk with a FAT.
    bench.qemu_img(&["convert", "-O", "raw", "fat:floppy:efi", "esp.img"]);
    let esp_bytes = bench.path("esp.img").metadata().expect("it is there").len();
    assert!(esp_bytes <= ESP_BYTES);
    copy_range(&bench.path("esp.img"), 0, &disk, ESP, esp_bytes);
    copy_range(&root.images()[0], 0, &disk, ROOT, ROOT_BYTES);
    bench.qemu_img(&["convert", "-c", "-O", "qcow2", "disk.img", "base.qcow2"]);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "vm.qcow2"];
    bench.qemu_img(&words);
    let base = std::fs::read(bench.path("base.qcow2")).expect("a file");
    let said = bench.does(&["info", "--backing", "vm.qcow2"]);
    assert!(said.contains("qcow2(base.qcow2, qcow2) > gpt:2 > btrfs\n"), "{said}");
    assert!(said.contains("EFI System Partition  holds FAT\n"), "{said}");

    std::fs::write(bench.path("hostname"), "vm-1\n").expect("a file");
    std::os::unix::fs::symlink("/proc/mounts", bench.path("mtab")).expect("a link");
    let tree = fill::directory(&bench.dir, "tree");
    for number in 0..100u32 {
        let lines = format!("{number} compresses well\n").repeat(1 << (number % 17));
        fill::write(&tree.join(format!("file-{number}")), lines.as_bytes());
    }
    std::os::unix::fs::symlink("file-1", tree.join("link")).expect("a link");
    edit_by_us(&bench, "vm.qcow2");
    {
        let mount = root.mount("rw,noatime,compress=zstd:3,subvolid=5");
        edit_by_the_kernel(&bench, mount.path());
    }

    assert!(std::fs::read(bench.path("base.qcow2")).expect("a file") == base, "the base changed");
    bench.qemu_img(&["check", "vm.qcow2"]);
    bench.qemu_img(&["convert", "-O", "raw", "vm.qcow2", "judged.img"]);
    let read = |image: &str| std::fs::read(bench.path(image)).expect("a file");
    let (before, after) = (read("disk.img"), read("judged.img"));
    let len = usize::try_from(ROOT).expect("small");
    assert!(before[..len] == after[..len], "the table or the system partition changed");
    let end = usize::try_from(ROOT + ROOT_BYTES).expect("small");
    assert!(before[end..] == after[end..], "the copy of the table changed");

    let edited = Disks::create(&judges, 1, ROOT_BYTES / MIB);
    copy_range(&bench.path("judged.img"), ROOT, &edited.images()[0], 0, ROOT_BYTES);
    edited.assert_checks();
    for subvolume in ["subvol=@", "subvol=@home", "subvol=@first"] {
        let [ours, theirs] =
            [&edited, &root].map(|disks| disks.mount(&format!("ro,noatime,{subvolume}")));
        let ours = HostFilesystem::new(ours.path()).expect("the mount opens");
        let compare = Compare::of_copies().without(Aspect::TimesOfNames);
        compare.run(&ours, theirs.path()).assert_same(2);
    }
    // A mount without options shows `@`, as before.
    let mount = edited.mount("ro,noatime");
    let hostname = std::fs::read(mount.path().join("etc/hostname")).expect("it is there");
    assert_eq!(hostname, b"vm-1\n");
}
