//! Programs that build images, with the link as the only `mkfs.btrfs` that they find.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use offshoot_testkit::btrfs::disks::AttachedImages;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::fill;
use offshoot_testkit::run::{command, run};

use super::Bench;
use super::filled::{assert_holds, judge, tree};

/// A program that finds the link, and no other `mkfs.btrfs`: that is in `/usr/sbin`.
fn caller(bench: &Bench, program: &Path) -> Command {
    let path = format!("{}:/usr/bin:/bin", bench.path("bin").display());
    assert!(!Path::new("/usr/bin/mkfs.btrfs").exists(), "the real tool would be found");
    let mut command = Command::new(program);
    command.env("PATH", path).current_dir(bench.dir.path()).stdin(Stdio::null());
    command
}

/// The program at the first of these paths where there is one.
fn found(paths: [&'static str; 2]) -> Option<&'static Path> {
    let path = paths.into_iter().map(Path::new).find(|path| path.exists());
    if path.is_none() {
        judges::skip(&format!("{} is not installed", paths[0]));
    }
    path
}

/// `systemd-repart` makes a disk with a partition. It locks a loop device over that, calls
/// `mkfs.btrfs`, and copies files through the kernel's mount.
#[test]
fn systemd_repart() {
    let Some(_judges) = judges::require() else { return };
    let repart = found(["/usr/bin/systemd-repart", "/bin/systemd-repart"]);
    let Some(repart) = repart else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    tree(&top);
    // It copies each name of a symbolic link as a link of its own.
    fs::remove_dir_all(top.join("links")).expect("a directory");
    let definitions = fill::directory(bench.dir.path(), "definitions");
    let definition = format!(
        "[Partition]\nType=root\nLabel=made-by-repart\nFormat=btrfs\nSizeMinBytes=300M\n\
         SizeMaxBytes=300M\nCopyFiles={}:/\n",
        top.display()
    );
    fs::write(definitions.join("10-root.conf"), definition).expect("a file");
    let repart = caller(&bench, repart)
        .args(["--empty=create", "--size=400M", "--definitions=definitions", "--dry-run=no"])
        .args(["--no-pager", "--seed=0f3c92a47a0e4d5e9c1b2d6e8f1a3b5c", "disk.img"])
        .output()
        .expect("it starts");
    assert!(repart.status.success(), "{}", String::from_utf8_lossy(&repart.stderr));
    // The first partition begins behind the first MiB.
    let cut = ["if=disk.img", "of=root.img", "bs=1M", "skip=1", "count=300", "conv=sparse"];
    let cut = command("dd").args(cut).current_dir(bench.dir.path()).output().expect("dd starts");
    assert!(cut.status.success());
    let image = bench.path("root.img");
    assert!(
        run("blkid", &["-p".as_ref(), image.as_os_str()]).contains("LABEL=\"root-x86-64\"")
            || run("blkid", &["-p".as_ref(), image.as_os_str()])
                .contains("LABEL=\"made-by-repart\"")
    );
    assert_holds(&image, &top, 20);
}

/// `systemd-makefs` locks a block device and calls `mkfs.btrfs`, as `x-systemd.makefs` in
/// `/etc/fstab` has it done.
#[test]
fn systemd_makefs() {
    let Some(_judges) = judges::require() else { return };
    let makefs = found(["/usr/lib/systemd/systemd-makefs", "/lib/systemd/systemd-makefs"]);
    let Some(makefs) = makefs else { return };
    let bench = Bench::new();
    let image = bench.image("disk.img", 300);
    {
        let attached = AttachedImages::new(std::slice::from_ref(&image));
        // It was a volume, and was wiped.
        bench.does(&format!("-q -L old {}", attached.devices()[0]));
        run("wipefs", &["-a", "-q", attached.devices()[0]]);
        let made = caller(&bench, makefs).args(["btrfs", attached.devices()[0]]).output();
        let made = made.expect("it starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    judge(&image, "rw", |mount| fs::write(mount.join("f"), "f").expect("it can be written"));
}
